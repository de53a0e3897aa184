"""Which model a device keeps, what it says about it, and the interval that it is said with."""

from __future__ import annotations

import pytest
import torch

from attune.common.interval import wilson
from attune.fedclient.console import comparison_of
from attune.fedclient.messages import Result
from attune.fedclient.work.baselines import choose


def right(text: str) -> torch.Tensor:
    return torch.tensor([letter == "1" for letter in text])


@pytest.mark.parametrize(
    ("personalized", "common", "local", "kept"),
    [
        ("1111", "1110", "1101", "personalized"),
        ("1010", "1010", "0101", "personalized"),  # the same, and as good
        ("1110", "1111", "0000", "personalized"),  # one more is no more than its own standard error
        ("1100", "1111", "0000", "common"),  # two more: 2 > sqrt(2)
        ("1111000000", "0000111111", "0000000000", "personalized"),  # 6 won, 4 lost: 2 < sqrt(10)
        ("0000000000", "1111000000", "1111111100", "local"),  # the best of those that are better
        ("0000000000", "1111000000", "1111100000", "common"),  # local is not clearly better than common
    ],
)
def test_another_model_must_be_clearly_better(personalized, common, local, kept):
    assert choose({"personalized": right(personalized), "common": right(common), "local": right(local)}) == kept


def test_the_positions_of_one_sequence_are_no_evidence_of_their_own():
    own, once, twice = (torch.tensor(rows, dtype=torch.bool) for rows in ([[0] * 4] * 2, [[1] * 4, [0] * 4], [[1] * 4] * 2))
    assert choose({"personalized": own, "common": once}) == "personalized"  # gains 4 and 0: 4 = sqrt(16)
    assert choose({"personalized": own, "common": twice}) == "common"  # 4 and 4: 8 > sqrt(32)


def test_alone_it_stays():
    assert choose({"personalized": right("0000")}) == "personalized"


def test_wilson_by_hand():
    # z = 1.959964, p = 0.9, n = 10: (0.9 + 0.192073) / 1.384146 -+ 1.959964 / 1.384146 * sqrt(0.009 + 0.0096036)
    low, high = wilson(0.9, 10)
    assert (low, high) == pytest.approx((0.595850, 0.982124), abs=1e-5)
    assert wilson(1.0, 20)[1] == 1.0 and 0.83 < wilson(1.0, 20)[0] < 0.84
    assert wilson(0.0, 20)[0] == 0.0
    assert wilson(0.5, 0) == (0.0, 1.0)


def result(own, common, local=None, samples=100, **more):
    found = {"accuracy_before": own, "accuracy_common": common, "accuracy_local": local, "test_samples": samples}
    return Result(order_id="evaluate-2-kiel", round=2, trained=False, samples=80, **found, **more)


@pytest.mark.parametrize(
    ("own", "common", "local", "said"),
    [
        (0.9, 0.4, 0.7, "personalization helps here: +0.200 over the local model"),
        (0.4, 0.9, None, "personalization does not help here: -0.500 against the common model"),
        (0.90, 0.88, None, "personalization and the common model are too close to tell apart on 100 test samples"),
    ],
)
def test_a_device_is_told_whether_it_helps(own, common, local, said):
    lines = comparison_of(result(own, common, local))
    assert said in lines
    assert lines[0].startswith(f"personalized  accuracy {own:.3f} (")
    assert lines[-1] == "kept: the personalized model (not chosen)"


def test_what_is_kept_is_named_with_its_reason():
    kept = result(0.4, 0.9, kept="common", validation_samples=9)
    assert comparison_of(kept)[-1] == "kept: the common model (chosen on 9 samples held out of training)"
    assert kept.accuracy == 0.9
    assert comparison_of(result(0.5, None)) == []
