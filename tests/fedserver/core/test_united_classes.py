"""Classes of the plan: a class is the same class at every site."""

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import attune
from attune.common.errors import SettingError, ShapeMismatch, UndeclaredLabels
from attune.common.plan import DataSettings, Label, Plan, Profile
from attune.fedserver.core import data_form, planning
from attune.fedserver.core.ballot import classes_apart, united_classes
from attune.fedserver.view.homes import render_status
from tests.needs import Later, needs

pytestmark = needs("pyarrow")
PYARROW, PARQUET = Later("pyarrow"), Later("pyarrow.parquet")


def profiles(**labels: list[Label]) -> dict[str, Profile]:
    return {name: Profile("tabular", (2,), values, 30, 10) for name, values in labels.items()}


# One class in the files of two sites: other forms of a number, other marks, letters of the same shape, letters without marks
WRITTEN_TWICE = [
    *(("1.5", "1.50"), ("+1", "1"), (".5", "0.5"), ("1E30", "1E+30"), ("1,000", "1000"), ("1,5", "1.5"), ("1.", "1")),
    *(("type a", "type_a"), ("type a", "type-a"), ("benign.", "benign"), ("'ill'", "ill"), ("❤", "❤\ufe0f"), ("١", "1")),
    *(("Iris", "lris"), ("I1", "Il"), ("Iris", "ıris"), ("o", "օ"), ("ag", "ɑɡ"), ("schön", "schon"), ("schön", "schoen")),
    *(("Ångström", "Angstrom"), ("naïve", "naive"), ("Straße", "STRASSE"), ("Łódź", "Lodz"), ("ﬁx", "fix"), ("a|b", "aIb")),
]


@pytest.mark.parametrize(
    ("of_a", "of_b", "classes"),
    [
        ([1, 2, 3], ["1", "2", "3a"], ["1", "2", "3", "3a"]),
        ([0, 1], [1, 2], [0, 1, 2]),
        ([117], ["0117", "117"], ["0117", "117"]),
        (["no", "yes"], ["no"], ["no", "yes"]),
        (["1.1", "1.10"], ["1.1", "1.2"], ["1.1", "1.10", "1.2"]),
        (["ER+", "A"], ["ER-", "A+"], ["A", "A+", "ER+", "ER-"]),
        (["mail", "12", "-1"], ["mall", "1-2", "1"], ["-1", "1", "1-2", "12", "mail", "mall"]),
        (["か", "й"], ["が", "и"], ["и", "й", "か", "が"]),
        (["schön", "schon"], ["schon"], ["schon", "schön"]),
    ],
)
def test_1_is_the_class_1_everywhere(of_a: list[Label], of_b: list[Label], classes: list[Label]) -> None:
    assert united_classes(profiles(a=of_a, b=of_b), []) == classes


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        (["Mild"], ["mild", "other"]),
        (["a"], ["а"]),
        (["x y"], ["x\u00a0y"]),
        ([0, 1], ["false", "true"]),
        ([1, 2], ["01", "02"]),
        *(([written], [other, "more"]) for written, other in WRITTEN_TWICE),
        ([f"a{number:06b}".translate({48: "I", 49: "l"}) + "x" * 249 for number in range(64)], [f"a{'l' * 6}{'X' * 249}"]),
    ],
)
def test_classes_that_look_alike_are_refused_with_the_devices(of_a: list[Label], of_b: list[Label]) -> None:
    with pytest.raises(SettingError, match=r"^(?=.{9,4999}$)(?=.*\(a\))(?=.*\(b\)).*in one way at all sites.*data\.classes"):
        united_classes(profiles(a=of_a, b=of_b), [])
    everything = [*map(str, of_a), *map(str, of_b)]
    assert united_classes(profiles(a=of_a, b=of_b), everything) == sorted(everything)


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        (["ja", "nein"], ["no", "yes"]),
        (["Ja", "Nein"], ["YES", "NO"]),
        (["ja"], ["no", "yes"]),
        ([0, 1], ["no", "yes"]),
        (["false", "true"], ["no", "yes"]),
        (["n", "y"], ["non", "oui"]),
        (["ja", "nein", "vielleicht"], ["no", "yes"]),
        (["ja", "nein", "unklar"], ["no", "yes", "unclear"]),
    ],
)
def test_yes_and_no_in_other_words_are_asked_back(of_a: list[Label], of_b: list[Label]) -> None:
    everything = sorted({*map(str, of_a), *of_b})
    with pytest.raises(SettingError, match=r"yes and no in other words: (?=.*\(a\))(?=.*\(b\)).*in one way") as error:
        united_classes(profiles(a=of_a, b=of_b), [])
    assert re.search(r"--map 'LABEL:[^=']+=[^=']+(,[^=']+=[^=']+)?'", str(error.value))
    line = re.search(r"`classes = (\[.*\])`", str(error.value))
    assert line and united_classes(profiles(a=of_a, b=of_b), json.loads(line[1])) == everything


@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        (["ja", "si", "en"], ["no", "fr"]),  # languages
        (["ja", "nein", "vielleicht"], ["yes", "maybe"]),
        (["0", "1", "x"], ["n", "y"]),
        (["no", "yes"], ["yes"]),
        (["n", "y", "j"], ["j", "n"]),
        (["f"], ["m", "t"]),
    ],
)
def test_other_classes_with_such_words_are_not(of_a: list[Label], of_b: list[Label]) -> None:
    assert united_classes(profiles(a=of_a, b=of_b), []) == sorted({*of_a, *of_b})


def test_classes_of_one_device_alone_are_said() -> None:
    said = classes_apart({"kiel": ["krank", "gesund"], "lund": ["ill", "well"], "oslo": ["ill", "well"]})
    assert "kiel (gesund, krank)" in said and "lund" not in said and "in other words" in said
    assert not classes_apart({"a": ["0", "1"], "b": ["1", "2"], "c": ["2"]}) and not classes_apart({"a": ["0"]})


def test_they_are_said_before_round_1_and_in_the_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng, words = np.random.default_rng(0), {"kiel": ["krank", "gesund"], "lund": ["ill", "well"], "oslo": ["ill", "well"]}
    data = {name: (rng.normal(size=(40, 2)), np.array(of)[np.arange(40) % 2]) for name, of in words.items()}
    result = attune.simulate(data, "fedavg", rounds=1, progress=False)
    assert "kiel (gesund, krank)" in caplog.text
    assert "warning: no class of these devices occurs at another one: kiel (gesund, krank)" in render_status(result.status)


def test_a_device_that_comes_later_is_held_to_the_same_classes() -> None:
    plan: Plan = planning.make_plan(planning.resolve({}), profiles(a=[1, 2], b=["1", "3a"]), "f")
    data_form.check_fits(profiles(c=[1, 2])["c"], plan, "c")
    with pytest.raises(UndeclaredLabels, match="c has labels \\['3A'\\] \\('3A' looks like '3a': write it so\\)"):
        data_form.check_fits(profiles(c=["1", "3A"])["c"], plan, "c")


def test_sites_of_different_forms_have_one_list_of_classes(tmp_path: Path) -> None:

    v, ill = np.arange(40) / 2, [n % 2 == 0 for n in range(40)]
    PARQUET.write_table(PYARROW.table({"v": v, "ill": ill}), tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("v,ill\n" + "".join(f"{n / 2},{n % 2 == 0}\n" for n in range(40)))
    (tmp_path / "c.csv").write_text("v,ill\n" + "".join(f"{n / 2},{str(n % 2 == 0).upper()} \n" for n in range(40)))
    result = attune.simulate([str(path) for path in sorted(tmp_path.iterdir())], "fedavg", rounds=1, label="ill")
    assert result.model("a").info.classes == ["false", "true"]


def test_texts_of_two_unicode_forms_are_one_class() -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) % 2
    composed, decomposed = np.array(["ja", "n\u00e9"])[y], np.array(["ja", "ne\u0301 "])[y]
    result = attune.simulate({"a": (x, composed), "b": (x, decomposed), "c": (x, composed.astype(object))}, "fedavg", rounds=1)
    assert result.model("b").info.classes == ["ja", "né"]


def test_a_device_may_tell_no_classes_if_the_operator_declares_them() -> None:
    silent = profiles(ann=[])["ann"]
    data_form.check_possible(silent, "ann")
    data_form.check_declared(silent, DataSettings(classes=[0, 1]), "ann")
    with pytest.raises(UndeclaredLabels, match=r"ann does not tell which classes .* and data.classes is not set"):
        data_form.check_declared(silent, DataSettings(), "ann")
    with pytest.raises(SettingError, match="ann declares no labels"):
        data_form.check_possible(msgspec.structs.replace(silent, task="regression"), "ann")


def test_a_device_may_tell_no_tokens_if_the_operator_declares_their_number() -> None:
    silent = Profile("tokens", (8,), [0, 1], 30, 10)
    data_form.check_possible(silent, "ann")
    data_form.check_declared(silent, DataSettings(vocabulary=50), "ann")
    with pytest.raises(ShapeMismatch, match=r"ann does not tell which tokens .* and data.vocabulary is not set"):
        data_form.check_declared(silent, DataSettings(), "ann")
