"""Sums of masked vectors: of whole cohorts, and of every set of devices that may be left at each exchange."""

from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES128
from cryptography.hazmat.primitives.ciphers.modes import CTR

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import FixedSurvivors, SecureMember, SecureMessage
from attune.common.secure import masks
from attune.common.secure.statements import Occasion
from attune.fedserver.core.collector import CohortRule, Collector
from tests.common.secure.cohort import FEDERATION, NAMES, RUN, SIZE, Cohort

SUBSETS = [subset for size in range(len(NAMES) + 1) for subset in combinations(NAMES, size)]
EXCHANGES = ("keys", "shares", "masked", "survivors", "unmasking")


@pytest.mark.parametrize("names", [NAMES[:3], NAMES[:5], NAMES])
def test_the_sum_is_that_of_the_vectors(names: tuple[str, ...]) -> None:
    cohort = Cohort(names).until("unmasking")
    cohort.exchange()
    np.testing.assert_array_equal(cohort.total(), cohort.plain(names))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_set_of_at_least_five_of_six_gives_its_exact_sum_and_fewer_give_none(exchange: str) -> None:
    """Four are the threshold: three colluders among four survivors would know the fourth one's update."""
    least = 4 if exchange in ("survivors", "unmasking") else 5  # who signs and unmasks need not be all who are summed
    before = Cohort().until(exchange)
    assert len(SUBSETS) == 64
    for subset in SUBSETS:
        cohort = before.copy()
        cohort.exchange(subset)
        if len(subset) < least:
            with pytest.raises(UpdateRefused, match=f"{len(subset)} of 6 devices .* {least} must; no sum is made"):
                cohort.total() if exchange == "unmasking" else cohort.server.advance()
            continue
        if exchange != "unmasking":
            cohort.server.advance()
            cohort.until("unmasking").exchange()
        summed = NAMES if exchange in ("survivors", "unmasking") else subset
        np.testing.assert_array_equal(cohort.total(), cohort.plain(summed))


def test_devices_that_leave_at_every_exchange() -> None:
    cohort = Cohort()
    for answering in (NAMES, NAMES, NAMES[1:], NAMES[1:5], NAMES[2:]):
        cohort.exchange(answering)
        if cohort.server.exchange != "unmasking":
            cohort.server.advance()
    np.testing.assert_array_equal(cohort.total(), cohort.plain(NAMES[1:]))


def test_a_restarted_server_goes_on_with_the_survivors_that_it_kept() -> None:
    cohort = Cohort().until("masked")
    cohort.exchange(NAMES[:5])
    cohort.server.advance()
    fixed = cohort.server.fixed
    assert isinstance(fixed, FixedSurvivors)
    cohort.exchange(NAMES[:2])  # two have signed when it is killed
    orders = {name: trained.order_id for name, trained in cohort.trained.items()}
    cohort.server = Collector(Occasion(FEDERATION, RUN, 7, 1), orders, CohortRule(NAMES, 3), fixed)
    cohort.until("unmasking").exchange()
    np.testing.assert_array_equal(cohort.total(), cohort.plain(NAMES[:5]))


def test_masked_vectors_look_random_and_a_second_attempt_has_other_masks() -> None:
    cohort = Cohort().until("survivors")
    first = dict(cohort.blobs)
    cohort.begin(2)
    cohort.until("survivors")
    for name in NAMES:
        assert not np.array_equal(first[name], cohort.blobs[name])
        assert not np.array_equal(cohort.blobs[name], cohort.vectors[name].view(np.uint32))
    cohort.until("unmasking").exchange()
    np.testing.assert_array_equal(cohort.total(), cohort.plain(NAMES))


def test_a_device_masks_the_same_bytes_again() -> None:
    cohort = Cohort().until("masked")
    cohort.exchange()
    again = {name: cohort.masked(name) for name in NAMES}
    for name in NAMES:
        np.testing.assert_array_equal(again[name], cohort.blobs[name])
    assert {len(blob) for blob in again.values()} == {SIZE}


@pytest.mark.parametrize("count", [2, 257])
def test_too_few_and_too_many_devices_are_refused(count: int) -> None:
    names = tuple(f"d{number}" for number in range(count))
    with pytest.raises(UpdateRefused, match="at most 256 devices" if count > 3 else "no sum is made"):
        Collector(Occasion(FEDERATION, RUN, 1, 1), {}, CohortRule(names, 3))


BAD_ANSWERS = {
    "about another device": lambda answer: (SecureMember("eva", answer[0].mask_key, answer[0].share_key),),
    "about nobody": lambda answer: (),
    "twice": lambda answer: (answer[0], answer[0]),
    "a short key": lambda answer: (SecureMember("ada", b"12", answer[0].share_key),),
    "no signature": lambda answer: (SecureMember("ada", answer[0].mask_key, answer[0].share_key, answer[0].certificate),),
    "a long certificate": lambda answer: (SecureMember("ada", bytes(32), bytes(32), bytes(5000)),),
}


@pytest.mark.parametrize("bad", BAD_ANSWERS)
def test_an_answer_that_cannot_be_is_refused_and_the_others_go_on(bad: str) -> None:
    cohort = Cohort()
    answer = cohort.ask("ada")
    with pytest.raises(UpdateRefused):
        cohort.server.take("ada", SecureMessage(answer.order_id, 1, "keys", BAD_ANSWERS[bad](answer.members)))
    assert "ada" not in cohort.server.pending
    cohort.until("unmasking").exchange()
    np.testing.assert_array_equal(cohort.total(), cohort.plain(NAMES[1:]))


def test_answers_to_another_attempt_or_exchange_are_ignored() -> None:
    cohort = Cohort()
    answer = cohort.ask("ada")
    cohort.begin(2)
    assert not cohort.server.take("ada", answer)
    cohort.until("shares")
    assert not cohort.server.take("ada", SecureMessage("train-7-ada", 2, "keys", answer.members))
    assert "ada" in cohort.server.pending


def test_wrong_shares_give_no_sum() -> None:
    cohort = Cohort().until("unmasking")
    cohort.exchange(NAMES[1:])
    answer = cohort.ask("ada")
    wrong = tuple(SecureMember(member.name, secret=bytes(31) + b"\1") for member in answer.members)
    cohort.server.take("ada", SecureMessage(answer.order_id, 1, "unmasking", wrong))
    with pytest.raises(UpdateRefused, match="no sum is made"):
        cohort.total()


def test_a_mask_is_aes_in_counter_mode() -> None:
    """The same blocks by plain counter mode: SP 800-38D begins with the block 2 after the nonce."""
    seed, size = bytes(range(31)), masks.PIECE + 5
    key = masks.for_purpose(seed, b"aes-128 mask of shared", 16)
    blocks = Cipher(AES128(key), CTR((7).to_bytes(12, "big") + (2).to_bytes(4, "big"))).encryptor().update(bytes(4 * size))
    mask = masks.total_mask([(seed, False)], "shared", 7, size)
    np.testing.assert_array_equal(mask, np.frombuffer(blocks, "<u4"))


@pytest.mark.parametrize("size", [1, masks.PIECE, masks.PIECE + 1, 3 * masks.PIECE + 7])
def test_masks_are_the_stream_of_their_key_whatever_their_length(size: int) -> None:
    seed, longer = bytes(range(31)), 4 * masks.PIECE
    whole = masks.total_mask([(seed, False)], "shared", 2, longer)
    np.testing.assert_array_equal(masks.total_mask([(seed, False)], "shared", 2, size), whole[:size])
    assert not masks.total_mask([(seed, False), (seed, True)], "shared", 2, size).any()
    others = [masks.total_mask([(seed, False)], part, number, longer) for part, number in (("shared", 3), ("generated", 2))]
    assert all(not np.array_equal(whole, other) for other in others)
    counts = np.unpackbits(whole.view(np.uint8))
    assert abs(float(counts.mean()) - 0.5) < 0.005
