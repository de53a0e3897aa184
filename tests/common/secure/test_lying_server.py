"""A server that lies to the devices of secure aggregation: each device refuses, and gives no second answer."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace as changed

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMember, SecureMessage
from attune.common.identity.credential import Credential, load_key
from attune.common.secure.statements import Occasion, certificate_der, keys_statement, signed
from attune.fedclient.secure_member import MaskableOrder, MemberState, Participant
from tests.common.secure.cohort import FEDERATION, NAMES, RUN, Authority, Cohort, credential_of, the_authority

Change = Callable[[SecureMessage], SecureMessage]


def listing(change: Callable[[tuple[SecureMember, ...]], tuple[SecureMember, ...]], threshold: int | None = None) -> Change:
    def lie(message: SecureMessage) -> SecureMessage:
        return changed(
            message, members=change(message.members), threshold=message.threshold if threshold is None else threshold
        )

    return lie


def refused_by_all(cohort: Cohort, lie: Change, match: str) -> None:
    """Check that each device refuses the lie and keeps its state."""
    for name in cohort.members:
        before = cohort.states[name]
        with pytest.raises(UpdateRefused, match=match):
            cohort.ask(name, lie)
        assert cohort.states[name] == before


def sign(
    name: str,
    cohort: Cohort,
    credential: Credential | None = None,
    mask_key: bytes = bytes(31) + b"\1",
    share_key: bytes = bytes(31) + b"\2",
) -> SecureMember:
    """Return an entry of a cohort's list that is well signed, by the device's own key or another one."""
    credential = credential or credential_of(name)
    entry = SecureMember(name, mask_key, share_key, certificate_der(credential))
    return changed(entry, signature=signed(keys_statement(cohort.server.occasion, entry), credential))


# --- the cohort's list

COHORTS: dict[str, tuple[Change, str]] = {
    "two devices": (listing(lambda members: members[:2], 2), "sum over 2 devices"),
    "no device": (listing(lambda members: (), 0), "protects nobody"),
    "a device twice": (listing(lambda members: (members[0], *members)), "a device twice"),
    "not in order": (listing(lambda members: members[::-1]), "not in order"),
    "a threshold of half": (listing(lambda members: members, 3), "protects nobody"),
    "a threshold of none": (listing(lambda members: members, 0), "protects nobody"),
    "more than all": (listing(lambda members: members, 7), "protects nobody"),
    "no signatures": (listing(lambda m: tuple(changed(one, signature=b"") for one in m)), "signature of"),
    "other keys": (listing(lambda m: tuple(changed(one, mask_key=bytes(32)) for one in m)), "not have this device's keys"),
}


@pytest.mark.parametrize("lie", COHORTS)
def test_a_false_cohort_is_refused_by_each_device(lie: str) -> None:
    refused_by_all(Cohort().until("shares"), *COHORTS[lie])


def mask_key_of(cohort: Cohort, name: str) -> bytes:
    return next(member for member in cohort.server.request(name).members if member.name == name).mask_key


ENTRIES: dict[str, tuple[Callable[[Cohort], SecureMember], str]] = {
    "one device under two names": (
        lambda cohort: sign("gus", cohort, the_authority().credential("gus", load_key(credential_of("ada").key_pem))),
        "one device under two names",
    ),
    "keys twice": (lambda cohort: sign("gus", cohort, None, mask_key_of(cohort, "bo")), "one device under two names"),
    "another authority": (
        lambda cohort: sign("gus", cohort, Authority().credential("gus")),
        "not of this device's authority",
    ),
    "expired": (lambda cohort: sign("gus", cohort, the_authority().credential("gus", days=-1.0)), "has expired"),
    "another name": (lambda cohort: sign("gus", cohort, credential_of("ada")), "another name"),
}


@pytest.mark.parametrize("lie", ENTRIES)
def test_an_entry_that_is_signed_and_wrong_is_refused_by_each_device(lie: str) -> None:
    make, match = ENTRIES[lie]
    cohort = Cohort().until("shares")
    entry = make(cohort)
    refused_by_all(cohort, listing(lambda members: (*members, entry), 4), match)


def clock_is(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Set the devices' clock so far ahead; negative: behind. Their certificates are valid from 2 days ago to 1 day from now."""
    clock = Mock(now=lambda zone: datetime.now(zone) + timedelta(days=days))
    monkeypatch.setattr("attune.common.secure.statements.datetime", clock)


def test_a_certificate_that_was_good_before_is_refused_once_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of certificates are kept from round to round; whether they have expired is asked each time."""
    cohort = Cohort().until("shares")
    cohort.copy().exchange()
    clock_is(monkeypatch, 2)
    refused_by_all(cohort, lambda message: message, "has expired")


def test_a_device_whose_clock_went_back_before_the_certificates_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """By such a clock no certificate ever expires."""
    cohort = Cohort().until("shares")
    cohort.copy().exchange()
    clock_is(monkeypatch, -3.1)
    refused_by_all(cohort, lambda message: message, "certificate of .* is valid from .* on, but it is .* here: set")


def test_a_clock_that_went_back_revives_no_certificate_that_is_over(monkeypatch) -> None:
    cohort = Cohort().until("shares")
    older, newer = the_authority().credential("gus", days=-1), the_authority().credential("hal", since=-0.5)
    entries = (sign("gus", cohort, older), sign("hal", cohort, newer, bytes(31) + b"\3", bytes(31) + b"\4"))
    clock_is(monkeypatch, -1.2)
    refused_by_all(cohort, listing(lambda members: (*members, *entries), 5), "certificate of gus .* has expired .* hal")


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_hour_wrong_changes_no_sum(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """As summer time by mistake. New certificates of the server begin an hour before they were issued."""
    clock_is(monkeypatch, hours / 24)
    cohort = Cohort().until("unmasking")
    cohort.exchange()
    assert cohort.total().tolist() == cohort.plain(NAMES).tolist()


def test_a_clock_that_goes_back_in_an_attempt_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom a device hands in with is judged once. Rounds and attempts are counted, so no clock makes an old one new."""
    cohort = Cohort().until("masked")
    usual = cohort.copy()
    usual.until("unmasking").exchange()
    clock_is(monkeypatch, -100)
    cohort.until("unmasking").exchange()
    assert cohort.total().tolist() == usual.total().tolist() == cohort.plain(NAMES).tolist()
    cohort.begin(2)
    refused_by_all(cohort, lambda message: message, "round 7 is summed already")


def test_a_plan_cannot_make_the_minimum_smaller_than_three() -> None:
    cohort = Cohort(NAMES[:3], minimum=1).until("shares")
    pair = listing(lambda members: members[:2], 2)
    refused_by_all_in(cohort, NAMES[:2], pair, "at least 3")


def refused_by_all_in(cohort: Cohort, names: tuple[str, ...], lie: Change, match: str) -> None:
    for name in names:
        with pytest.raises(UpdateRefused, match=match):
            cohort.ask(name, lie)


# --- a second word on what is fixed


@pytest.mark.parametrize(
    ("exchange", "left", "threshold", "match"),
    [
        ("shares", 5, 3, "two cohorts"),
        ("masked", 5, None, "two sets of masks"),
        ("survivors", 4, None, "two sets of survivors"),
        ("survivors", 5, None, "two sets of survivors"),
    ],
)
def test_a_second_word_is_refused(exchange: str, left: int, threshold: int | None, match: str) -> None:
    cohort = Cohort().until(exchange)
    cohort.exchange()
    refused_by_all(cohort, listing(lambda members: members[:left], threshold), match)


SURVIVORS: dict[str, tuple[Change, str]] = {
    "two devices": (listing(lambda members: members[:2]), "sum over 2 devices|not this device"),
    "a device twice": (listing(lambda members: (*members, members[0])), "a device twice"),
    "a stranger": (listing(lambda members: (*members, SecureMember("gus"))), "a stranger"),
    "below the threshold": (listing(lambda members: members[:3]), "at least 5|not this device"),
    "no more than the threshold": (listing(lambda members: members[:4]), "at least 5|not this device"),
}


@pytest.mark.parametrize("lie", SURVIVORS)
def test_false_survivors_are_refused_by_each_device(lie: str) -> None:
    refused_by_all(Cohort().until("survivors"), *SURVIVORS[lie])


def test_survivors_without_the_device_are_refused_by_it() -> None:
    cohort = Cohort().until("survivors")
    refused_by_all_in(cohort, ("flo",), listing(lambda members: members[:5]), "not this device")


UNMASKINGS: dict[str, tuple[Change, str]] = {
    "other survivors": (listing(lambda members: members[:5]), "two sets of survivors"),
    "too few signatures": (
        listing(lambda m: tuple(one if n < 3 else changed(one, signature=b"") for n, one in enumerate(m))),
        "3 devices have signed",
    ),
    "a copied signature": (
        listing(lambda members: tuple(changed(one, signature=members[0].signature) for one in members)),
        "signature of",
    ),
}


@pytest.mark.parametrize("lie", UNMASKINGS)
def test_a_false_unmasking_is_refused_by_each_device(lie: str) -> None:
    refused_by_all(Cohort().until("unmasking"), *UNMASKINGS[lie])


# --- attempts


@pytest.mark.parametrize("exchange", ["shares", "masked", "survivors", "unmasking"])
def test_messages_of_another_attempt_are_refused(exchange: str) -> None:
    cohort = Cohort().until(exchange)
    refused_by_all(cohort, lambda message: changed(message, attempt=2), "none for which this device has keys")


def test_an_older_attempt_is_refused() -> None:
    cohort = Cohort(attempt=2).until("shares")
    for name in NAMES:
        with pytest.raises(UpdateRefused, match="attempt 1 of round 7 is over"):
            cohort.members[name].answer(cohort.states[name], SecureMessage(f"train-7-{name}", 1, "keys"), cohort.trained[name])


def test_no_new_attempt_once_a_device_was_asked_about_survivors() -> None:
    cohort = Cohort().until("survivors")
    cohort.exchange()
    cohort.begin(2)
    refused_by_all(cohort, lambda message: message, "round 7 is summed already")


def test_a_round_that_is_issued_again_later_is_refused() -> None:
    cohort = Cohort().until("survivors")
    cohort.exchange()
    later = Cohort(round_=8)
    later.states = cohort.states
    later.until("shares")
    again = Cohort(round_=7)
    again.states = later.states
    refused_by_all(again, lambda message: message, "round 7 is summed already")


def test_keys_mask_one_vector_alone() -> None:
    cohort = Cohort().until("masked")
    cohort.trained = {name: replace(trained, vector="another") for name, trained in cohort.trained.items()}
    refused_by_all(cohort, lambda message: message, "none for which this device has keys")


def test_another_order_than_the_finished_one_is_refused() -> None:
    cohort = Cohort()
    refused_by_all(cohort, lambda message: changed(message, order_id="train-6-x"), "not this device's finished order")


def test_lost_keys_answer_nothing_but_a_new_attempt() -> None:
    cohort = Cohort().until("masked")
    cohort.states["ada"] = MemberState()
    with pytest.raises(UpdateRefused, match="none for which this device has keys"):
        cohort.ask("ada")


def test_a_server_that_shows_devices_other_cohorts_learns_no_smaller_sum() -> None:
    """Three of eleven hand in to a sum of five. The two others of it share their keys with six that sum without these two.

    With the six's shares the masks of the two could be taken off, and what is left is the sum of three.
    """
    few, gone, others = ("ada", "bo", "cy"), ("dan", "eva"), tuple(f"gus{number}" for number in range(6))
    cohort = Cohort((*few, *gone, *others), minimum=5)
    keys = {name: cohort.ask(name).members[0] for name in cohort.members}
    shown = dict.fromkeys(few, ((*few, *gone), 3)) | dict.fromkeys(others, ((*gone, *others), 5))
    shown |= dict.fromkeys(gone, (tuple(keys), 6))

    def told(name: str, exchange: Any, members: Iterable[SecureMember]) -> SecureMessage:
        message = SecureMessage(cohort.trained[name].order_id, 1, exchange, tuple(members), shown[name][1])
        cohort.states[name], answer = cohort.members[name].answer(cohort.states[name], message, cohort.trained[name])
        return answer

    sealed = {}
    for name, (cast, _) in shown.items():
        answer = told(name, "shares", (keys[member] for member in sorted(cast)))
        sealed[name] = {member.name: member.secret for member in answer.members}
    for name in (*few, *others):
        shares = (SecureMember(sender, secret=sealed[sender][name]) for sender in sorted(shown[name][0]))
        with pytest.raises(UpdateRefused, match="a share is not what another device has sealed for this one"):
            told(name, "masked", shares)


def test_a_share_of_each_device_is_given_once_and_never_both() -> None:
    cohort = Cohort().until("masked")
    cohort.exchange(NAMES[:5])
    cohort.server.advance()
    cohort.until("unmasking")
    answers = {name: cohort.ask(name).members for name in NAMES[:5]}
    for members in answers.values():
        assert [member.name for member in members] == list(NAMES)
        assert {len(member.secret) for member in members} == {32}
    again = {name: cohort.ask(name).members for name in NAMES[:5]}
    assert again == answers


def test_a_member_needs_its_own_authority_for_others() -> None:
    """With an authority that is not the server's, certificates of the server are none."""
    cohort, org = Cohort().until("shares"), Authority()
    guarded = Participant("ada", org.credential("ada"), org.pem, FEDERATION, RUN, 3)
    trained = MaskableOrder("train-7-ada", 7, "v")
    state, answer = guarded.answer(MemberState(), SecureMessage("train-7-ada", 1, "keys"), trained)
    members = (answer.members[0], *(m for m in cohort.server.request("bo").members if m.name != "ada"))
    with pytest.raises(UpdateRefused, match="--authority"):
        guarded.answer(state, SecureMessage("train-7-ada", 1, "shares", members, 4), trained)
    assert Occasion(FEDERATION, RUN, 7, 1) == cohort.server.occasion
