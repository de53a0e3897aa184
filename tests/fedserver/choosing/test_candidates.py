"""Entrants of a race: what each trains, with which model, and who takes no part."""

from typing import Any

import pytest

from attune.common.errors import SettingError
from attune.common.plan import Profile
from attune.fedserver.choosing.candidates import entrants_of
from attune.fedserver.choosing.racing import ALONE, CLOSED_FORM
from attune.fedserver.core.planning import resolve

IMAGES = dict.fromkeys("abc", Profile("images", (8, 8, 1), [3, 9], 100, 30))
TABLES = dict.fromkeys("abc", Profile("tabular", (4,), [0, 1], 100, 30))
RACE: dict[str, Any] = {"method": {"name": "auto"}, "round": {"rounds": 10}}


def entrants(profiles: Any, given: Any = RACE, sums: str = "abc") -> Any:
    return entrants_of(given, profiles, lambda _, settings: settings, sums)


def test_training_alone_uses_nothing_of_others_and_the_closed_form_nothing_else() -> None:
    race = entrants(IMAGES)
    assert list(race.settings) == [ALONE, CLOSED_FORM, "fedavg", "fedper", "fedtp", "fedmcsa"] and not race.left_out
    resolved = {name: resolve(settings) for name, settings in race.settings.items()}
    assert (resolved[ALONE].method.name, resolved[ALONE].round.analytic) == ("local", "off")
    assert (resolved[CLOSED_FORM].method.name, resolved[CLOSED_FORM].round.analytic) == ("local", "auto")
    assert {resolved[name].round.analytic for name in ("fedavg", "fedper", "fedtp", "fedmcsa")} == {"auto"}


@pytest.mark.parametrize(
    ("profiles", "sums", "why"),
    [(IMAGES, "a", "fewer than 2 of 3 devices allow it"), (TABLES, "abc", "devices have no common scale")],
)
def test_without_sums_there_is_no_closed_form_in_the_race(profiles: Any, sums: str, why: str) -> None:
    race = entrants(profiles, sums=sums)
    assert CLOSED_FORM not in race.settings and why in race.left_out[CLOSED_FORM]
    off = entrants(profiles, {**RACE, "round": {"rounds": 10, "analytic": "off"}})
    assert off.left_out[CLOSED_FORM] == "round.analytic is off"
    with pytest.raises(SettingError, match="local shares nothing that privacy"):
        entrants(profiles, {**RACE, "privacy": {"secure_aggregation": True}})  # behind masks there is no race at all


def test_a_method_has_its_usual_model_unless_one_is_named() -> None:
    """FedTP needs attention; the others would be given its model for nothing."""
    usual = entrants(IMAGES)
    assert "name" not in usual.settings["fedavg"].get("model", {})
    named = entrants(TABLES, {**RACE, "model": {"name": "mlr"}})
    assert {settings["model"]["name"] for settings in named.settings.values()} == {"mlr"}
    assert "mlr has no tensors of the roles qkv" in named.left_out["fedtp"]


def test_named_candidates_may_be_the_closed_form() -> None:
    race = entrants(IMAGES, {**RACE, "auto": {"candidates": [CLOSED_FORM, "fedper"]}})
    assert list(race.settings) == [ALONE, CLOSED_FORM, "fedper"]
    with pytest.raises(SettingError, match="fedavgg"):
        entrants(IMAGES, {**RACE, "auto": {"candidates": ["fedavgg"]}})
