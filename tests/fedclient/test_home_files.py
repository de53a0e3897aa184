"""Files of a device's home: a version that they carry, and changed bytes that are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from attune.common.errors import HomeMismatch
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity, ShardRecord
from attune.fedserver.identity.authority import Authority

NOW = ShardRecord(40, "38e47090c3fde5e733b0", ["1f", "2e"])


@pytest.fixture
def home(tmp_path: Path) -> DeviceHome:
    home = DeviceHome(tmp_path / "home")
    with home.locked():
        home.compare_shard(NOW)
    return home


def test_a_home_of_a_newer_format_is_refused_in_one_line(home: DeviceHome) -> None:
    assert (home.path / "format").read_text() == "1\n"
    (home.path / "format").write_text("2\n")
    with pytest.raises(HomeMismatch, match="update it") as refused, home.locked():
        pass
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", [None, "", "x", "\x00"])
def test_a_home_without_a_readable_format_is_taken_over(home: DeviceHome, text: str | None) -> None:
    path = home.path / "format"
    path.unlink() if text is None else path.write_text(text)
    with home.locked():
        assert path.read_text() == "1\n"


def test_a_changed_byte_of_the_data_that_were_held_out_is_noticed(home: DeviceHome) -> None:
    path = home.path / "shard.json"
    path.write_bytes(path.read_bytes().replace(b'"1f"', b'"1e"'))
    with pytest.raises(HomeMismatch, match=r"shard\.json is damaged"):
        home.held_rows()


def test_a_record_of_an_older_version_or_with_more_fields_is_read(home: DeviceHome) -> None:
    path = home.path / "shard.json"
    path.write_bytes(b'{"samples":40,"digest":"38e47090c3fde5e733b0","held":["1f"]}')
    assert home.held_rows() == ["1f"]


def test_a_changed_name_is_noticed(home: DeviceHome, tmp_path: Path) -> None:
    authority, key = Authority.create(tmp_path / "ca"), new_key()
    home.keep(
        Identity("kiel", Credential(key, authority.issue_device(csr_der(key, "kiel"), "kiel", 9)), authority.certificate_pem)
    )
    home.remember(DeviceInfo("kiel", "host:1"))
    assert home.identity() is not None
    path = home.path / "device.json"
    path.write_bytes(path.read_bytes().replace(b"kiel", b"kiem"))
    with pytest.raises(HomeMismatch, match="names 'kiem'"):
        home.identity()
