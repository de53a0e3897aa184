"""Votes on the form of the data before round 1: a token is one voice, and no device floods the classes."""

from __future__ import annotations

import msgspec
import pytest

from attune.common.errors import SettingError
from attune.common.plan import Profile
from attune.fedserver.core.data_form import agree, one_token, too_many_classes
from attune.fedserver.core.united_classes import united_classes

USUAL = Profile(kind="tabular", shape=(3,), labels=[0, 1, 2], samples=20, test_samples=5)
OTHER = msgspec.structs.replace(USUAL, shape=(7,))
HONEST = dict.fromkeys(("ada", "bob", "carl"), USUAL)
FAKE = {f"fake{number}": OTHER for number in range(8)}
OWN = {"ada": "1", "bob": "2", "carl": "3"}


def many(count: int, start: int = 0) -> Profile:
    return msgspec.structs.replace(USUAL, labels=list(range(start, start + count)))


def test_any_number_of_names_of_one_token_are_one_voice() -> None:
    agreement = agree({**HONEST, **FAKE}, OWN | dict.fromkeys(FAKE, "stolen"))
    assert set(agreement.agreed) == set(HONEST)
    assert set(agreement.odd) == set(FAKE)


def test_columns_are_voted_on_by_tokens_too() -> None:
    named = {name: msgspec.structs.replace(USUAL, column_names=["a", "b", "c"]) for name in HONEST}
    fake = {name: msgspec.structs.replace(USUAL, column_names=["x", "y", "z"]) for name in FAKE}
    assert set(agree({**named, **fake}, OWN | dict.fromkeys(fake, "stolen")).agreed) == set(HONEST)


def test_a_fleet_of_one_token_votes_device_by_device() -> None:
    fleet = {**HONEST, "eve": OTHER}
    assert set(agree(fleet, dict.fromkeys(fleet, "shared")).agreed) == set(HONEST)
    assert set(agree(fleet).agreed) == set(HONEST)


def test_a_fleet_of_one_token_is_named() -> None:
    assert "all 3 devices joined with one token" in one_token(dict.fromkeys(HONEST, "shared"))
    for tokens in (OWN, dict.fromkeys(HONEST, ""), {"ada": "1", "bob": "1"}, dict.fromkeys(HONEST, "1") | {"dora": "2"}):
        assert one_token(tokens) == ""


def test_one_token_against_one_is_a_tie_however_many_names_each_has() -> None:
    tie = agree({**HONEST, **FAKE}, dict.fromkeys(HONEST, "a") | dict.fromkeys(FAKE, "b")).tie
    assert "one token have one vote" in tie and "data.shape" in tie


@pytest.mark.parametrize("count", [101, 1000, 60_000])
def test_a_device_that_declares_many_times_the_usual_classes_is_refused_by_name(count: int) -> None:
    refused = too_many_classes({**HONEST, "eve": many(count)}, {})
    assert set(refused) == {"eve"}
    assert f"eve declares {count} classes" in str(refused["eve"]) and "data.classes" in str(refused["eve"])


def test_names_of_one_token_do_not_move_the_usual_number_of_classes() -> None:
    fake = {f"fake{number}": many(60_000) for number in range(8)}
    assert set(too_many_classes({**HONEST, **fake}, OWN | dict.fromkeys(fake, "stolen"))) == set(fake)


def test_up_to_a_hundred_classes_and_ten_times_the_usual_number_are_honest() -> None:
    assert too_many_classes({**HONEST, "eve": many(100)}, {}) == {}
    assert too_many_classes({name: many(50) for name in "abc"} | {"d": many(500)}, {}) == {}


def test_all_classes_together_have_a_limit_too() -> None:
    fleet = {f"d{number}": many(9_000, 9_000 * number) for number in range(8)}
    assert too_many_classes(fleet, {}) == {}
    with pytest.raises(SettingError, match=r"72000 classes together.*data\.classes"):
        united_classes(fleet, [])
