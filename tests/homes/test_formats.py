"""Files of a later format are refused in one line, also where this version could not read their fields."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attune.common.errors import HomeMismatch, NoModel
from attune.fedclient.model.artifact import read_info
from attune.fedserver.home import ServedAddress, ServerHome

LATER = json.dumps({"format": 2, "name": ["of another type"], "host": 7})


def test_a_finished_model_of_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(LATER)
    with pytest.raises(NoModel, match=r"model\.json was written by a newer version of fedclient: update fedclient$"):
        read_info(tmp_path)


def test_an_address_of_a_later_format_is_refused_and_one_without_a_format_is_read(tmp_path: Path) -> None:
    home = ServerHome(tmp_path)
    home.write_address(ServedAddress("localhost", 7, 8))
    assert home.address() == ServedAddress("localhost", 7, 8)
    (tmp_path / "server.json").write_text(LATER)
    with pytest.raises(HomeMismatch, match=r"server\.json was written by a newer version of fedserver: update fedserver$"):
        home.address()
