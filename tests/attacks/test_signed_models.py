"""A finished model or an export that somebody changed, signed anew, or took from another federation."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from attune.common.errors import AttuneError, CertificateRefused, FingerprintMismatch, HomeMismatch
from attune.common.identity.credential import Credential, csr_der, key_fingerprint_of, new_key
from attune.common.identity.signed_files import FILE, REVOKED, files_in, revoked_in, sign, verify
from attune.fedclient.cli import main
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity
from attune.fedserver.identity.authority import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca")


def device_of(authority: Authority, name: str = "ada", days: float = 90.0) -> Credential:
    key = new_key()
    return Credential(key, authority.issue_device(csr_der(key, "x"), name, days))


@pytest.fixture
def home(tmp_path: Path, authority: Authority) -> DeviceHome:
    """Return the home of ada, with a finished model that she has signed."""
    home = DeviceHome(tmp_path / "ada")
    home.path.mkdir()
    home.remember(DeviceInfo("ada", "localhost:1"))
    home.keep(Identity("ada", device_of(authority), authority.certificate_pem))
    (home.model / "more").mkdir(parents=True)
    for name in ("model.json", "model.safetensors", "more/own.safetensors"):
        (home.model / name).write_bytes(name.encode() * 1000)
    assert home.sign(home.model) == "ada"
    return home


def test_a_signed_model_says_who_signed_it(home: DeviceHome, authority: Authority) -> None:
    said = verify(home.model, authority.certificate_pem)
    assert said.signer == "ada" and sorted(said.files) == ["model.json", "model.safetensors", "more/own.safetensors"]
    assert abs(said.signed_at - time.time()) < 3600


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", "more/own.safetensors"])
def test_a_changed_byte_is_noticed(home: DeviceHome, authority: Authority, name: str) -> None:
    data = bytearray((home.model / name).read_bytes())
    data[500] ^= 1
    (home.model / name).write_bytes(data)
    with pytest.raises(HomeMismatch, match="is not the file that ada signed"):
        verify(home.model, authority.certificate_pem)


def removed(model: Path) -> None:
    (model / "model.json").unlink()


def added(model: Path) -> None:
    (model / "more" / "else.safetensors").write_bytes(b"x")


def linked(model: Path) -> None:
    (model / "model.json").rename(model.parent / "elsewhere")
    (model / "model.json").symlink_to(model.parent / "elsewhere")


def piped(model: Path) -> None:
    os.mkfifo(model / "pipe")


@pytest.mark.parametrize("change", [removed, added, linked, piped])
def test_a_file_that_comes_goes_or_points_elsewhere_is_noticed(
    home: DeviceHome, authority: Authority, change: Callable[[Path], None]
) -> None:
    change(home.model)
    with pytest.raises(HomeMismatch):
        verify(home.model, authority.certificate_pem)


def rewritten(model: Path, **changed: object) -> None:
    """Change fields of the signature file, or of its statement."""
    signed = msgspec.json.decode((model / FILE).read_bytes())
    statement = msgspec.json.decode(signed["statement"])
    for name, value in changed.items():
        (statement if name in statement else signed)[name] = value
    signed["statement"] = msgspec.json.encode(statement).decode()
    (model / FILE).write_bytes(msgspec.json.encode(signed))


def test_digests_that_are_changed_with_the_file_are_not_signed(home: DeviceHome, authority: Authority) -> None:
    data = b"another model"
    (home.model / "model.json").write_bytes(data)
    said = verify_files(home.model)
    rewritten(home.model, files=said)
    with pytest.raises(HomeMismatch, match="was not made by ada"):
        verify(home.model, authority.certificate_pem)


def verify_files(model: Path) -> dict[str, str]:
    """Return the digests of the files as they are now."""
    import hashlib

    return {path.relative_to(model).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files_in(model)}


def test_another_devices_name_is_no_signers(home: DeviceHome, authority: Authority) -> None:
    rewritten(home.model, signer="bob")
    with pytest.raises(CertificateRefused, match="ada"):
        verify(home.model, authority.certificate_pem)


def test_no_device_signs_as_the_authority(home: DeviceHome, authority: Authority) -> None:
    sign(home.model, files_in(home.model), device_of(authority), authority.certificate_pem, "")
    with pytest.raises(CertificateRefused):
        verify(home.model, authority.certificate_pem)


def test_a_model_of_another_federation_is_refused(home: DeviceHome, authority: Authority, tmp_path: Path) -> None:
    """Eve has an authority of her own, a device of the same name there, and names the victim's authority beside it."""
    eve = Authority.create(tmp_path / "eve")
    for named in (eve.certificate_pem, authority.certificate_pem):
        sign(home.model, files_in(home.model), device_of(eve), named, "ada")
        with pytest.raises(FingerprintMismatch, match="another federation"):
            verify(home.model, authority.certificate_pem)
    sign(home.model, files_in(home.model), eve.credential, authority.certificate_pem, "")
    with pytest.raises(FingerprintMismatch):
        verify(home.model, authority.certificate_pem)


def test_no_join_token_signs(home: DeviceHome, authority: Authority) -> None:
    from attune.common.identity.token import JoinToken

    bootstrap = JoinToken.new(authority.public_key_compressed).bootstrap()
    sign(home.model, files_in(home.model), bootstrap, authority.certificate_pem, "ada")
    with pytest.raises(FingerprintMismatch):
        verify(home.model, authority.certificate_pem)


@pytest.mark.parametrize("days", [91.0, -2.0, 400.0])
def test_a_certificate_that_was_not_valid_then_signs_nothing(
    home: DeviceHome, authority: Authority, days: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is the signer's word: a certificate that is good for years cannot be used for a later time either."""
    credential = device_of(authority, days=1000.0 if days == 400.0 else 90.0)
    then = time.time() + days * 86400.0
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: then)
        sign(home.model, files_in(home.model), credential, authority.certificate_pem, "ada")
    with pytest.raises(CertificateRefused, match="was not valid then"):
        verify(home.model, authority.certificate_pem)


def exported(authority: Authority, folder: Path, *revoked: bytes) -> Path:
    folder.mkdir()
    (folder / REVOKED).write_bytes(msgspec.json.encode([key_fingerprint_of(pem) for pem in revoked]))
    sign(folder, files_in(folder), authority.credential, authority.certificate_pem, "")
    return folder


def test_what_a_revoked_device_signed_does_not_count(home: DeviceHome, authority: Authority, tmp_path: Path) -> None:
    identity = home.identity()
    assert identity is not None
    pem = authority.certificate_pem
    others, hers = device_of(authority, "bob").certificate_pem, identity.credential.certificate_pem
    verify(home.model, pem, revoked_in(exported(authority, tmp_path / "before", others), pem))
    with pytest.raises(CertificateRefused, match="revoked"):
        verify(home.model, pem, revoked_in(exported(authority, tmp_path / "after", others, hers), pem))


def test_the_list_of_revoked_devices_is_the_authoritys(home: DeviceHome, authority: Authority, tmp_path: Path) -> None:
    pem = authority.certificate_pem
    export = exported(authority, tmp_path / "export")
    sign(export, files_in(export), device_of(authority), pem, "ada")
    with pytest.raises(HomeMismatch, match="signed by a device"):
        revoked_in(export, pem)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"statement": "{}", "signature": "", "certificate": "", "authority": ""}'])
def test_a_signature_that_cannot_be_read_is_refused_by_name(home: DeviceHome, authority: Authority, text: str) -> None:
    (home.model / FILE).write_text(text)
    with pytest.raises(HomeMismatch, match="cannot be read"):
        verify(home.model, authority.certificate_pem)


def test_a_signature_of_a_newer_version_asks_for_an_update(home: DeviceHome, authority: Authority) -> None:
    rewritten(home.model, format=2)
    with pytest.raises(HomeMismatch, match="update"):
        verify(home.model, authority.certificate_pem)


def test_any_text_for_a_certificate_or_a_signature_is_refused(home: DeviceHome, authority: Authority) -> None:
    for field, value in (("certificate", "none"), ("signature", "AAAA"), ("certificate", authority.certificate_pem.decode())):
        home.sign(home.model)
        rewritten(home.model, **{field: value})
        with pytest.raises(AttuneError):
            verify(home.model, authority.certificate_pem)


def test_the_command_says_who_signed_and_fails_otherwise(home: DeviceHome, authority: Authority, tmp_path: Path) -> None:
    exported_file = tmp_path / "model.onnx"
    exported_file.write_bytes(b"a graph")
    home.sign(exported_file)
    ca = str(tmp_path / "ca" / "ca.pem")
    for place, trusted in ((home.model, ca), (exported_file, str(home.path))):
        said = CliRunner().invoke(main, ["verify-model", str(place), "--authority", trusted])
        assert said.exit_code == 0 and "signed by ada" in said.output and "--revoked" in said.output, said.output
    (tmp_path / f"model.onnx.{FILE}").unlink()
    refused = CliRunner().invoke(main, ["verify-model", str(exported_file), "--authority", ca])
    assert refused.exit_code == CertificateRefused.exit_code and "no signature" in refused.output
