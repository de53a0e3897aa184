"""Names of columns: kept in the shard, and checked against the federation's, by the server and by the device."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attune
from attune.common.errors import AttuneError, SettingError, ShapeMismatch, ShardError
from attune.common.plan import DataSettings, Profile
from attune.common.schema import difference, wrong_with
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions
from attune.fedserver.core.data_form import agree, check_declared, check_possible, columns_of
from attune.simulation.partition.datasets import load_source
from attune.simulation.partition.split import partition, write_shards

ROWS = [(number, -number, number % 2) for number in range(40)]


def table(path: Path, *, head: str = "age,dose,ill", turned: bool = False) -> Path:
    path.write_text("\n".join([head, *(f"{b},{a},{y}" if turned else f"{a},{b},{y}" for a, b, y in ROWS)]) + "\n")
    return path


def profile(*names: str, width: int = 2, **changed: Any) -> Profile:
    given = {"kind": "tabular", "shape": (width,), "labels": [0, 1], "samples": 9, "test_samples": 3} | changed
    return Profile(**given, column_names=list(names))


def test_reversed_columns_do_not_train_in_silence(tmp_path: Path) -> None:
    for name, head, turned in (("kiel", "age,dose,ill", False), ("lund", "dose,age,ill", True)):
        source = load_source(str(table(tmp_path / f"{name}.csv", head=head, turned=turned)), options=ReadOptions.of("ill"))
        write_shards(tmp_path / name, partition(source, "iid", clients=1))
    shards = {name: str(tmp_path / name / "shard0") for name in ("kiel", "lund")}
    with pytest.raises(AttuneError, match="dose"):
        attune.simulate(shards, "fedavg", rounds=1)


def test_the_error_names_the_column_and_what_to_do(tmp_path: Path, plan_for: Any) -> None:
    import msgspec

    shard = load_shard(table(tmp_path / "kiel.csv", head="dose,age,ill", turned=True), options=said(label="ill"))
    plan = msgspec.structs.replace(plan_for("tabular", (2,), [0, 1]), column_names=["age", "dose"])
    with pytest.raises(ShapeMismatch, match=r"column 1 is 'dose', and 'age' is expected there; .*--columns age,dose"):
        prepare(shard, plan)
    again = load_shard(table(tmp_path / "kiel.csv", head="dose,age,ill", turned=True), options=said("ill", columns="age,dose"))
    assert np.array_equal(np.sort(again.train_x[:, 0]), np.sort(-again.train_x[:, 1]))
    assert len(prepare(again, plan).train_x) + len(prepare(again, plan).validation_x) == 30


def said(label: str = "", **more: str) -> Any:
    from attune.fedclient.read_options import ReadOptions

    return ReadOptions.of(label, **more)


@pytest.mark.parametrize(
    ("own", "expected", "clause"),
    [
        (["a", "b"], ["a", "b"], ""),
        ([], ["a", "b"], ""),
        (["a", "b"], [], ""),
        (["b", "a"], ["a", "b"], "has the columns in another order: column 1 is 'b', and 'a' is expected there"),
        (["a", "c"], ["a", "b"], "lacks the columns 'b' and has 'c' instead"),
        (["a", "b", "c"], ["a", "b"], "has 'c' besides"),
    ],
)
def test_how_two_lists_differ(own: list[str], expected: list[str], clause: str) -> None:
    assert difference(own, expected) == clause


@pytest.mark.parametrize("names", [["a"], ["a", "a"], ["a", ""], ["a", "b\n"], ["a", "b" * 300], ["a", "b" * (1 << 21)]])
def test_names_that_cannot_be(names: list[str]) -> None:
    assert wrong_with(names, 2) and len(wrong_with(names, 2)) < 200
    with pytest.raises(SettingError, match="kiel declares"):
        check_possible(profile(*names), "kiel")


def test_names_of_what_has_no_columns() -> None:
    with pytest.raises(SettingError, match="names of columns for tokens"):
        check_possible(profile("a", kind="tokens", shape=(1,)), "kiel")


def test_the_majority_of_those_who_name_columns_decides() -> None:
    found = agree({"a": profile("x", "y"), "b": profile("x", "y"), "c": profile("y", "x"), "d": profile()})
    assert sorted(found.agreed) == ["a", "b", "d"] and list(found.odd) == ["c"]
    assert columns_of(found.agreed) == ["x", "y"]


def test_two_who_differ_decide_nothing() -> None:
    found = agree({"a": profile("x", "y"), "b": profile("y", "x")})
    assert not found.agreed and "data.columns" in found.tie and "the shard of b" in found.tie


def test_one_device_alone_names_no_columns_for_many() -> None:
    agreed = agree({"a": profile("x", "y"), "b": profile(), "c": profile()}).agreed
    assert len(agreed) == 3 and columns_of(agreed) == []


def test_what_the_operator_declares_is_what_everybody_must_have() -> None:
    declared = DataSettings(columns=["x", "y"])
    check_declared(profile("x", "y"), declared, "kiel")
    check_declared(profile(), declared, "kiel")
    with pytest.raises(ShapeMismatch, match="kiel has the columns in another order"):
        check_declared(profile("y", "x"), declared, "kiel")


@pytest.mark.parametrize(
    ("meta", "message"), [({"columns": ["a"]}, "1 column names for 5 columns"), ({"columns": []}, "0 col")]
)
def test_names_in_meta_json_are_checked(write: Any, samples: Any, meta: Any, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        load_shard(write(*samples("tabular"), meta=meta))


def test_a_finished_model_knows_its_columns(tmp_path: Path) -> None:
    for name in ("kiel", "lund"):
        table(tmp_path / f"{name}.csv")
    result = attune.simulate(str(tmp_path / "*.csv"), "fedavg", rounds=1, label="ill")
    model = result.model("kiel")
    assert model.info.column_names == ["age", "dose"]
    turned = load_shard(table(tmp_path / "t.csv", head="dose,age,ill", turned=True), options=said("ill"))
    with pytest.raises(ShapeMismatch, match="another order"):
        model.evaluate(turned)
