"""Secure sums on a device: its memory of them, the sums that it refuses, and the secrets of an attempt."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as changed

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMember
from attune.common.protocol import OTHER_COHORT, SAMPLES_BEFORE, SUMMED_BEFORE
from attune.common.secure import masks
from attune.common.secure.statements import Occasion
from attune.common.text import from_json
from attune.fedclient import sum_book
from attune.fedclient.secure_member import AttemptSecrets
from attune.fedclient.sum_book import OF_SAMPLES, SumBook
from attune.fedserver.core.collector import AFTER
from tests.common.secure.cohort import NAMES, Cohort

OF_EIGHT = tuple(f"d{number}" for number in range(8))


def test_from_one_start_there_is_one_sum_unless_the_survivors_are_exactly_the_same() -> None:
    book = SumBook().noting("w0", NAMES[:5], same_cohort=False)
    assert book.refuses("w0", NAMES[4::-1], same_cohort=False) == ""
    for others in (NAMES[:4], NAMES, NAMES[1:]):
        assert book.refuses("w0", others, same_cohort=False).startswith(SUMMED_BEFORE)
        assert book.refuses("w1", others, same_cohort=False) == ""
        assert book.refuses("", others, same_cohort=False) == ""
    assert from_json(msgspec.json.encode(book), SumBook) == book


def test_sums_over_samples_are_in_one_sum_of_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is served, and however many rounds are in between. Sums of new data over the same devices differ by the news."""
    monkeypatch.setattr(sum_book, "MOST_STARTS", 3)
    first, other = f"{OF_SAMPLES}of-monday", f"{OF_SAMPLES}of-tuesday"
    assert SumBook().refuses(first, NAMES, same_cohort=False) == ""
    book = SumBook().noting(first, NAMES, same_cohort=False)
    for start in "abcdef":
        book = book.noting(start, NAMES[:4], same_cohort=False)
    book = from_json(msgspec.json.encode(book), SumBook)
    assert book.refuses(first, NAMES[::-1], same_cohort=False) == "", "the same sum again, after a restart"
    assert book.refuses("g", NAMES[:3], same_cohort=False) == ""
    for start, names in ((first, NAMES[1:]), (first, (*NAMES, "new")), (other, NAMES)):
        assert book.refuses(start, names, same_cohort=False) == SAMPLES_BEFORE


def test_the_oldest_starts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sum_book, "MOST_STARTS", 3)
    book = SumBook()
    for start in ("a", "b", "c", "a", "d"):
        book = book.noting(start, NAMES, same_cohort=False)
    assert list(book.starts) == ["c", "a", "d"]


def test_another_cohort_must_have_lost_a_majority_of_each_earlier_one() -> None:
    book = SumBook().noting("w0", OF_EIGHT, same_cohort=True)
    assert book.refuses("w1", OF_EIGHT, same_cohort=True) == ""
    for others in (OF_EIGHT[1:], (*OF_EIGHT, "new"), (*OF_EIGHT[4:], "new")):
        assert book.refuses("w1", others, same_cohort=True).startswith(OTHER_COHORT)
        assert book.refuses("w1", others, same_cohort=False) == "", "the plan does not ask for it"
    second = (*OF_EIGHT[:3], "new", "newer")
    assert book.refuses("w1", second, same_cohort=True) == ""
    book = book.noting("w1", second, same_cohort=True)
    assert book.refuses("w2", second, same_cohort=True) == ""
    assert "at least 5 of these 8, not 0" in book.refuses("w2", OF_EIGHT, same_cohort=True), "not even with the first one again"
    assert book.refuses("w2", ("new", "newer", *OF_EIGHT[1:3]), same_cohort=True) != ""


def again(book: SumBook, *, same_cohort: bool = False) -> Cohort:
    """Return a cohort in round 8 whose devices have trained from the start of round 7, which they remember."""
    cohort = Cohort(round_=8)
    for name in NAMES:
        cohort.trained[name] = replace(cohort.trained[name], start="w0", book=book)
        cohort.members[name].same_cohort = same_cohort
    return cohort.until("shares")


@pytest.mark.parametrize("same_cohort", [False, True])
def test_a_device_shares_no_secret_with_another_cohort(same_cohort: bool) -> None:
    """Whoever is in the sum could be chosen once the updates are masked, by devices that have not been in one."""
    start = "other" if same_cohort else "w0"
    cohort = again(SumBook().noting(start, NAMES[:5], same_cohort), same_cohort=same_cohort)
    for name in NAMES:
        with pytest.raises(UpdateRefused, match=OTHER_COHORT if same_cohort else SUMMED_BEFORE):
            cohort.ask(name)
        assert not cohort.states[name].members


def test_a_device_masks_and_signs_for_exactly_the_same_devices_alone() -> None:
    cohort = again(SumBook().noting("w0", NAMES, same_cohort=False))
    whole = cohort.copy().until("unmasking")
    whole.exchange()
    assert whole.total().tolist() == whole.plain(NAMES).tolist()
    for missing in ("masked", "survivors"):
        fewer = cohort.copy()
        while fewer.server.exchange != missing:
            fewer.exchange(NAMES[:5] if AFTER[fewer.server.exchange] == missing else None)
            fewer.server.advance()
        with pytest.raises(UpdateRefused, match=SUMMED_BEFORE):
            fewer.ask("ada")
        assert not fewer.states["ada"].survivors


def test_the_server_hears_why_and_with_whom_alone_devices_are_in_sums() -> None:
    cohort = again(SumBook())
    for name in NAMES[:4]:
        request = cohort.server.request(name)
        refused = changed(request, refused=f"{OTHER_COHORT}, so no", members=request.members[:3])
        with pytest.raises(UpdateRefused):
            cohort.server.take(name, refused)
    assert (cohort.server.kept_cohort, cohort.server.bound) == (NAMES[:3], False)
    with pytest.raises(UpdateRefused):
        cohort.server.take("eva", changed(cohort.server.request("eva"), refused=SUMMED_BEFORE))
    assert cohort.server.bound


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
