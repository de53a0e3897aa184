"""Identity of a device: enrolling, staying the same, and every refusal with its exit code."""

import re
import socket
import time
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from attune.common import homes
from attune.common.errors import (
    CertificateRefused,
    FingerprintMismatch,
    HomeBusy,
    HomeMismatch,
    NameTaken,
    NotEnrolled,
    TokenRefused,
    Unreachable,
)
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.identity.token import JoinToken
from attune.fedclient.address import ServerAddress
from attune.fedclient.cli import main
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity, local_token
from attune.fedserver.identity.authority import Authority


@pytest.fixture
def quick(bench):
    """Run a server without work: a device that is accepted ends with an evaluation."""
    bench.server.works, bench.server.rounds = ["evaluate"], [0]
    return bench


def refused(bench, kind, exit_code, **changed):
    with pytest.raises(kind) as caught:
        bench.run(**changed)
    assert caught.value.exit_code == exit_code
    return str(caught.value)


def test_an_enrolled_device_stays_who_it_is_and_ignores_a_token(quick):
    quick.run()
    quick.run(token="not even a token", name=None)
    assert quick.server.seen.enrolled == ["kiel"]
    assert "already enrolled as kiel; the token is ignored" in quick.lines.lines
    assert (quick.folder / "home" / "identity" / "device.pem").stat().st_mode & 0o077 == 0


def test_the_private_key_never_leaves_and_a_lost_answer_costs_no_name(quick, monkeypatch):
    monkeypatch.setattr(DeviceHome, "keep", lambda self, identity: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quick.run()
    monkeypatch.undo()
    monkeypatch.setenv("ATTUNE_HOME", str(quick.folder / "attune"))
    quick.run()
    assert quick.server.seen.enrolled == ["kiel", "kiel"], "the same key asked twice"


def test_an_expired_device_comes_back_under_its_name_with_its_key_and_a_new_token(quick):
    quick.run()
    folder = quick.folder / "home" / "identity"
    key = Credential.load(folder).key_pem
    past = datetime(2020, 1, 1, tzinfo=timezone.utc)
    expired = quick.server.authority.issue_device(csr_der(key, "kiel"), "kiel", 1, past)
    Credential(key, expired).save(folder)
    assert "expired on 2020-01-02" in refused(quick, CertificateRefused, 14, token=None)
    quick.run(token=quick.server.token())
    assert quick.server.seen.enrolled == ["kiel", "kiel"]
    assert Credential.load(folder).key_pem == key
    assert Credential.load(folder).certificate_pem != expired


def test_a_token_that_is_no_token(quick):
    refused(quick, TokenRefused, 11, token="abc")


def test_a_token_the_server_does_not_know_is_refused_at_once(quick):
    unknown = JoinToken.new(quick.server.authority.public_key_compressed).encode()
    refused(quick, TokenRefused, 11, token=unknown, connect_timeout_s=1000.0)


def test_an_expired_token_is_refused_at_once_with_the_reason(quick):
    assert "expired" in refused(quick, TokenRefused, 11, token=quick.server.token(ttl_s=-1.0), connect_timeout_s=1000.0)


def test_a_token_of_another_authority_is_a_fingerprint_mismatch_at_once(quick, tmp_path):
    other = Authority.create(tmp_path / "other")
    token = JoinToken.new(other.public_key_compressed).encode()
    refused(quick, FingerprintMismatch, 12, token=token, connect_timeout_s=1000.0)


def test_an_enrolled_device_that_meets_another_server_there(quick, make_bench):
    quick.run()
    stranger = make_bench()
    refused(quick, FingerprintMismatch, 12, token=None, server=ServerAddress("127.0.0.1", stranger.server.port))


def test_a_certificate_of_the_federation_that_the_server_turns_away_is_tried_again(quick):
    quick.run()
    elsewhere = Authority.create(quick.folder / "new authority")
    quick.server.tls.update([elsewhere.certificate_pem], quick.server.authority.issue_server())
    assert "clock" in refused(quick, Unreachable, 13, token=None, connect_timeout_s=1.0)


def test_a_name_that_another_key_holds(quick):
    quick.run()
    refused(quick, NameTaken, 10, home=quick.folder / "home2")


def test_a_name_that_contradicts_the_home(quick):
    quick.run()
    assert "belongs to device 'kiel', not 'bonn'" in refused(quick, HomeMismatch, 4, name="bonn")


def test_a_home_in_use(quick):
    with DeviceHome(quick.folder / "home").locked():
        refused(quick, HomeBusy, 5)


def test_nobody_there_is_given_up_after_the_timeout(quick):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = ServerAddress("127.0.0.1", free.getsockname()[1])
    said = refused(quick, Unreachable, 13, server=address, connect_timeout_s=0.5)
    assert "Nobody listens" in said
    assert sum("trying again" in line for line in quick.lines.lines) == 1


def test_without_token_or_identity_it_says_how_to_get_one(quick):
    assert "fedserver token" in refused(quick, NotEnrolled, 15, token=None)


def test_the_default_home_is_one_per_server_and_shard(tmp_path):
    first = homes.device_home("host", 1, tmp_path / "a" / "shard")
    assert first.parent == tmp_path / "attune" / "devices" / "host_1"
    assert first.name.startswith("shard-")
    assert (
        len(
            {
                first,
                homes.device_home("host", 1, tmp_path / "b" / "shard"),
                homes.device_home("host", 2, tmp_path / "a" / "shard"),
            }
        )
        == 3
    )
    assert homes.device_home("h/../x", 1, tmp_path / "..").is_relative_to(tmp_path / "attune" / "devices")


def test_the_default_home_keeps_the_letters_of_a_shard_and_is_the_one_that_was_there(tmp_path):
    shard = tmp_path / "München Süd.csv"
    home = homes.device_home("host", 1, shard)
    assert home.name.startswith("München_Süd-")
    older = home.with_name(f"M_nchen_S_d-{home.name.rpartition('-')[2]}")
    older.mkdir(parents=True)
    assert homes.device_home("host", 1, shard) == older


def test_what_join_left_is_adopted_by_the_first_shard(quick):
    where = f"127.0.0.1:{quick.server.port}"
    result = CliRunner().invoke(main, ["join", "--server", where, "--token", quick.server.token(), "--name", "bonn"])
    assert result.exit_code == 0, result.output
    assert "enrolled as bonn" in result.output
    refused(quick, HomeMismatch, 4, token=None, home=None, name="kiel")
    folder = quick.run(token=None, home=None, name=None)
    assert folder.parent == homes.device_home("127.0.0.1", quick.server.port, quick.shard)
    assert quick.server.seen.enrolled == ["bonn"]
    assert DeviceHome(homes.joined_home("127.0.0.1", quick.server.port)).identity() is None
    again = CliRunner().invoke(main, ["join", "--server", where, "--token", quick.server.token(), "--name", "ulm"])
    assert again.exit_code == 0, "the next device of this machine may join"


@pytest.mark.parametrize("where", ["a file", "standard input"])
def test_a_token_comes_from_a_file_or_from_standard_input(quick, tmp_path, where):
    file = tmp_path / "token"
    text = f"{quick.server.token()}\n"
    file.write_text(text)
    command = ["join", "--server", f"127.0.0.1:{quick.server.port}", "--name", "bonn", "--token-file"]
    given = {"args": [*command, str(file)]} if where == "a file" else {"args": [*command, "-"], "input": text}
    result = CliRunner().invoke(main, **given)
    assert (result.exit_code, quick.server.seen.enrolled) == (0, ["bonn"]), result.output


def test_a_token_is_given_once_and_a_file_without_one_is_said(quick, tmp_path):
    command = ["join", "--server", f"127.0.0.1:{quick.server.port}"]
    both = CliRunner().invoke(main, [*command, "--token", "x", "--token-file", "-"])
    assert (both.exit_code, "give one" in both.output) == (2, True)
    neither = CliRunner().invoke(main, command)
    assert (neither.exit_code, "--token-file" in neither.output) == (2, True)
    missing = CliRunner().invoke(main, [*command, "--token-file", str(tmp_path / "none")])
    assert (missing.exit_code, "cannot read a token" in missing.output) == (2, True)
    (tmp_path / "other").write_text("not a token")
    other = CliRunner().invoke(main, [*command, "--token-file", str(tmp_path / "other")])
    assert other.exit_code == 11


def test_the_local_servers_own_token_is_found_for_its_port_only(quick):
    folder = homes.server_home()
    folder.mkdir(parents=True)
    (folder / "server.json").write_bytes(msgspec.json.encode({"port": quick.server.port}))
    (folder / "local-token").write_text(quick.server.token())
    assert local_token(ServerAddress("localhost", quick.server.port + 1)) is None
    assert local_token(ServerAddress("example.org", quick.server.port)) is None
    quick.run(token=None, server=ServerAddress("localhost", quick.server.port), home=None, name=None)
    (name,) = quick.server.seen.enrolled
    assert re.fullmatch("device-[0-9a-f]{12}", name)


def test_a_device_without_a_name_tells_neither_its_host_nor_its_shard(quick):
    quick.run(name=None)
    (name,) = quick.server.seen.enrolled
    assert re.fullmatch("device-[0-9a-f]{12}", name)
    quick.run(name=None, token=None)  # it keeps its name
    assert DeviceHome(quick.folder / "home").record().name == name


@pytest.mark.parametrize("works", [True, False])
def test_a_certificate_past_two_thirds_of_its_life_is_renewed_on_connecting(quick, monkeypatch, works):
    quick.run()
    before = DeviceHome(quick.folder / "home").identity()
    due = before.credential.certificate_pem
    monkeypatch.setattr("attune.fedclient.link.grpc_link.needs_renewal", lambda pem, now: pem == due)
    quick.server.faults.no_renewals = not works
    quick.run(token=None)
    after = DeviceHome(quick.folder / "home").identity()
    assert after.ca_pem == before.ca_pem
    assert (after.credential.key_pem != before.credential.key_pem) is works
    assert any(("renewed" if works else "cannot renew") in line for line in quick.lines.lines)


def test_a_certificate_is_renewed_beside_a_stream_that_lasts(quick, monkeypatch):
    """Keep a stream open for longer than the certificate lives; without renewal the device would end with exit code 14."""
    quick.server.works, quick.server.rounds = ["train", "evaluate"], [1, 1]
    asked: list[bytes] = []

    def due(pem: bytes, now: object) -> bool:
        asked.append(pem)
        return len(asked) > 1 and pem == asked[0]  # not yet at the connection, and not after the renewal

    monkeypatch.setattr("attune.fedclient.link.grpc_link.needs_renewal", due)
    monkeypatch.setattr("attune.fedclient.device.RENEWAL_LOOK_S", 0.05)
    monkeypatch.setattr(
        "attune.fedclient.work.learner.fail_at", lambda who, round_, step: time.sleep(0.5 * (step == "trained"))
    )
    quick.run()
    assert "renewed this device's certificate" in quick.lines.lines
    assert len({fingerprint for fingerprint, _ in quick.server.seen.streams}) == 2, "it moved over to a stream of its own"


@pytest.mark.parametrize("damage", ["cut", "of another federation", "empty"])
def test_a_damaged_authority_is_damage_of_the_home_and_no_refusal(tmp_path: Path, damage: str) -> None:
    """Repeat seed 7042 of `make chaos`: a truncated ca.pem ended a device with 14 (refused), as if the operator had to act."""
    authority, stranger = (Authority.create(tmp_path / name) for name in ("ca", "other"))
    key = new_key()
    home = DeviceHome(tmp_path / "device")
    with home.locked():
        home.remember(DeviceInfo("pi", "host:1"))
        credential = Credential(key, authority.issue_device(csr_der(key, "pi"), "pi", 1))
        home.keep(Identity("pi", credential, authority.certificate_pem))
        assert home.identity() == Identity("pi", credential, authority.certificate_pem)
        path = home.identity_folder / "ca.pem"
        damaged = {"cut": path.read_bytes()[:475], "of another federation": stranger.certificate_pem, "empty": b""}
        path.write_bytes(damaged[damage])
        with pytest.raises(HomeMismatch, match=r"ca\.pem is damaged") as caught:
            home.identity()
    assert caught.value.exit_code == 4
