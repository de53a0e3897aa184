"""The run at the published size measures what it claims; tested with a small model on fast links."""

from __future__ import annotations

from benchmarks.delay import Way
from benchmarks.published_size import Size, measure


def test_it_counts_rounds_orders_bytes_and_memory():
    small = ("model.width=8", "model.depth=1", "model.heads=1", "model.patch=16", "method.hidden=4", "train.local_epochs=1")
    found = measure(Size(devices=3, cohort=2, rounds=2, train_samples=10, test_samples=10, settings=small), Way())
    assert len(found["rounds_s"]) == 2 and found["moved_bytes"]["connections"] >= 3
    orders = found["blob_bytes_of_an_order"]
    assert (orders["train"]["orders"], orders["evaluate"]["orders"]) == (4, 3)
    assert 0 < orders["train"]["all_up"] < found["moved_bytes"]["up"]
    assert found["after_the_rounds"]["server"]["peak_bytes"] > 50 << 20
