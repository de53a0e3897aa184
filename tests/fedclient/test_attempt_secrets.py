"""Secrets of an attempt: both ends open what the other has sealed, nobody else does, and each is computed once."""

from __future__ import annotations

from typing import Any

import pytest

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMember
from attune.common.secure import masks
from attune.common.secure.statements import Occasion
from attune.fedclient.attempt_secrets import AttemptSecrets
from tests.common.secure.cohort import NAMES, Cohort

ATTEMPT = Occasion("fed", "first", 7, 1)
PAIR, COHORT = bytes(range(64)), b"the cohort"


def secrets_of(name: str, occasion: Occasion = ATTEMPT) -> AttemptSecrets:
    return AttemptSecrets(name, name.encode().ljust(32), occasion)


def entry(name: str) -> SecureMember:
    return SecureMember(name, *secrets_of(name).public_keys)


def test_a_pair_of_shares_is_opened_by_its_receiver_alone() -> None:
    sealed = secrets_of("ada").sealed(PAIR, entry("bo"), COHORT)
    assert secrets_of("bo").opened(sealed, entry("ada"), COHORT) == PAIR
    for name, occasion, sender in (
        ("cy", ATTEMPT, "ada"),
        ("bo", ATTEMPT, "cy"),
        ("bo", Occasion("fed", "first", 7, 2), "ada"),
        ("bo", Occasion("fed", "first", 8, 1), "ada"),
    ):
        with pytest.raises(UpdateRefused, match="not what another device has sealed for this one"):
            secrets_of(name, occasion).opened(sealed, entry(sender), COHORT)
    with pytest.raises(UpdateRefused, match="not what another device has sealed for this one"):
        secrets_of("bo").opened(sealed, entry("ada"), b"another")


def test_a_device_opens_the_pair_that_it_keeps_of_itself() -> None:
    ada = secrets_of("ada")
    assert ada.opened(ada.sealed(PAIR, entry("ada"), COHORT), entry("ada"), COHORT) == PAIR


def test_after_a_good_text_another_one_of_the_same_device_is_opened_anew() -> None:
    ada, bo = secrets_of("ada"), secrets_of("bo")
    first, second = (ada.sealed(pair, entry("bo"), COHORT) for pair in (PAIR, PAIR[::-1]))
    assert [bo.opened(sealed, entry("ada"), COHORT) for sealed in (first, second, first)] == [PAIR, PAIR[::-1], PAIR]
    with pytest.raises(UpdateRefused):
        bo.opened(first[:-1] + bytes([first[-1] ^ 1]), entry("ada"), COHORT)
    with pytest.raises(UpdateRefused):
        bo.opened(first, entry("cy"), COHORT)


def test_shares_of_a_wrong_length_are_refused_each_time() -> None:
    sealed, bo = secrets_of("ada").sealed(PAIR[:40], entry("bo"), COHORT), secrets_of("bo")
    for _ in range(2):
        with pytest.raises(UpdateRefused, match="shares of ada have a wrong length"):
            bo.opened(sealed, entry("ada"), COHORT)


def test_in_a_whole_attempt_no_secret_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Any]] = []

    def counted(name: str) -> None:
        real = getattr(masks, name)
        monkeypatch.setattr(masks, name, lambda *given: done.append((name, given)) or real(*given))  # type: ignore[func-returns-value]

    for name in ("opened", "mask_key", "share_key"):
        counted(name)
    cohort = Cohort().until("unmasking")
    cohort.exchange()
    counts = {name: sum(what == name for what, _ in done) for name in ("opened", "mask_key", "share_key")}
    assert counts == {"opened": len(NAMES) ** 2, "mask_key": len(NAMES), "share_key": len(NAMES)}
