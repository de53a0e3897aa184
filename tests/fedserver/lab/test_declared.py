"""Refusals at the start of a server, for what its own settings rule out, before devices connect."""

from pathlib import Path
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import SettingError
from attune.fedserver.app import ServerOptions, run
from attune.fedserver.core.planning import resolve
from attune.fedserver.lab.declared import check_declared
from tests.needs import needs

pytestmark = needs("dp_accounting")
AGE, DOSE = {"kind": "number", "range": [0, 120]}, {"kind": "number"}
NOISE = {"unit": "example", "epsilon": 4.0}
CLIENT = {"unit": "client", "epsilon": 4.0, "devices": 100}
TABLE = {"kind": "tabular", "shape": [2]}
NO_RANGE = r"the schema has none for the columns dose: set `range` in their sections"


def checked(privacy: dict[str, Any], data: dict[str, Any], **more: Any) -> list[str]:
    return check_declared(resolve({"method": {"name": "fedavg"}, "privacy": privacy, "data": data, **more}))


@pytest.mark.parametrize(
    ("privacy", "data", "more", "said"),
    [
        (NOISE, {"columns": {"age": AGE, "dose": DOSE}}, {}, NO_RANGE),
        (NOISE | {"unit": "group"}, {"columns": {"age": AGE, "dose": DOSE}, "classes": ["a", "b"]}, {}, NO_RANGE),
        (NOISE | {"ranges": [(0, 1)]}, {"columns": {"age": AGE}}, {}, r"privacy\.ranges and a schema cannot be combined"),
        (NOISE | {"ranges": [(0, 1)] * 3}, TABLE | {"classes": ["a"]}, {}, r"privacy\.ranges has 3 ranges, .* have 2 columns"),
        (CLIENT, TABLE | {"task": "classes"}, {}, r"needs data\.classes"),
        (CLIENT | {"noise": 0.1}, {}, {}, r"privacy\.noise = 0\.1 costs epsilon"),
        ({}, TABLE | {"classes": ["a", "b"]}, {"train": {"augment": ["flip"]}}, r"train\.augment is for images"),
        ({}, {"columns": {"age": {"kind": "number", "range": [2, 1]}}}, {}, "range"),
    ],
)
def test_settings_that_no_devices_can_have_are_refused(privacy: Any, data: Any, more: Any, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        checked(privacy, data, **more)


@pytest.mark.parametrize(
    ("privacy", "data"),
    [
        (NOISE, {"columns": {"age": AGE}, "classes": ["a", "b"]}),
        (NOISE | {"ranges": [(0, 1)] * 2}, TABLE | {"classes": ["a", "b"]}),
        (NOISE | {"target_ranges": [(0, 9)] * 3}, TABLE | {"task": "regression"}),
        (CLIENT, TABLE),  # perhaps numbers are predicted
        (CLIENT, TABLE | {"classes": ["a", "b"], "task": "classes"}),
        ({}, {"columns": {"age": AGE, "dose": DOSE}}),
        ({}, TABLE),
    ],
    ids=str,
)
def test_what_some_devices_can_have_is_not_refused(privacy: Any, data: Any) -> None:
    assert checked(privacy, data) == []


@pytest.mark.parametrize(
    ("privacy", "data", "named"),
    [
        (NOISE, {}, "data.classes"),
        (NOISE, {"task": "classes"}, "data.classes"),
        (NOISE, {"kind": "tokens", "classes": ["a", "b"]}, "data.vocabulary"),
        (NOISE, {"task": "regression"}, ""),
        (NOISE, {"classes": ["a", "b"]}, ""),
        ({}, {}, ""),
    ],
)
def test_what_devices_with_a_limit_do_not_tell_is_asked_for_at_the_start(privacy: Any, data: Any, named: str) -> None:
    lines = checked(privacy, data)
    assert len(lines) == bool(named)
    assert all(named in line and "--max-epsilon" in line for line in lines)


def test_a_start_that_cannot_work_leaves_no_home(tmp_path: Path) -> None:
    said: list[str] = []
    options = ServerOptions(tmp_path / "home", "127.0.0.1", 0, True, said.append, None)
    settings: dict[str, Any] = {"method": {"name": "fedavg"}, "privacy": NOISE}
    with pytest.raises(SettingError, match="range"):
        aio.run(run(options, settings | {"data": {"columns": {"age": AGE, "dose": DOSE}}}))
    assert not (tmp_path / "home").exists() and said == []
