"""The numbers of an update: what becomes of them, and which are refused by name."""

from __future__ import annotations

import math

import pytest

from attune.common.errors import UpdateRefused
from attune.common.pb import federation_pb2 as pb
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.records import Device
from attune.fedserver.federation.updates import row_of

ORDER = OrderId("evaluate", 3, "kiel")
KIEL = Device("kiel", "key", 0.0, False, True, 0.0, 40, 1, 3, 0.0, "")


def update(samples=40, **metrics):
    return pb.Update(order_id=str(ORDER), samples=samples, metrics=pb.Metrics(**metrics))


def test_an_evaluation_has_all_that_was_compared():
    said = {"accuracy_before": 0.5, "accuracy_common": 0.25, "accuracy_local": 0.75, "kept": "local", "test_samples": 8}
    row = row_of(ORDER, update(**said), KIEL)
    assert {name: getattr(row, name) for name in said} == said
    assert (row.round, row.work, row.client, row.samples, row.loss, row.accuracy_after) == (
        3,
        "evaluate",
        "kiel",
        40,
        None,
        None,
    )


def test_what_a_device_does_not_say_is_null():
    row = row_of(ORDER, update(), KIEL)
    assert (row.accuracy_common, row.accuracy_local, row.kept) == (None, None, None)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"accuracy_common": 1.5}, "accuracy_common = 1.5"),
        ({"accuracy_local": math.nan}, "accuracy_local = nan"),
        ({"kept": "the best of all"}, "'the best of all'"),
        ({"samples": 41}, "claims 41 samples; it declared 40"),
    ],
)
def test_impossible_numbers_are_refused(said, named):
    with pytest.raises(UpdateRefused, match="kiel") as refusal:
        row_of(ORDER, update(**said), KIEL)
    assert named in str(refusal.value)
