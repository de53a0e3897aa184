"""Pairs of features: each runs two rounds, or is refused with both names when the server starts."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

import attune
from attune.common.errors import SettingError

USUAL = {"model.name": "mlr", "method.name": "fedavg", "round.rounds": 2, "round.analytic": "off", "train.local_epochs": 1}
FEATURES: dict[str, dict[str, Any]] = {
    "privacy.secure_aggregation": {"privacy.secure_aggregation": True},
    'privacy.unit = "client"': {
        "privacy.unit": "client", "privacy.devices": 6, "privacy.noise": 1.0, "privacy.insecure_seed": 1,
        "data.classes": [0, 1],
    },
    'privacy.unit = "example"': {"privacy.unit": "example", "privacy.noise": 1.0, "privacy.insecure_seed": 1},
    'round.mode = "buffered"': {"round.mode": "buffered", "round.buffer": 5},
    'method.embedding = "device"': {"method.name": "pfedhn", "method.embedding": "device"},
    'method.embedding = "described"': {"method.name": "pfedhn", "method.embedding": "described"},
    "method analytic": {"method.name": "analytic", "model.name": "closed-form"},
    "method ditto": {"method.name": "ditto"},
    "method fedamp": {"method.name": "fedamp"},
    "method.dial": {"method.name": "fedmcsa", "method.dial": True},
    "method.robust": {"method.robust": "median"},
    "method.bound_change": {"method.bound_change": 3.0},
    "method.bound_samples": {"method.bound_samples": 5.0},
    "method.shared_optimiser": {"method.shared_optimiser": "adam"},
    "round.analytic": {"round.analytic": "auto"},
    "round.take_back": {"round.take_back": 10.0},
    'round.train = "all"': {"round.train": "all", "round.clients": 5},
    "round.adapt_rounds": {"round.adapt_rounds": 1},
    "round.over_selection": {"round.over_selection": 0.2, "round.clients": 5},
    "round.quorum": {"round.quorum": 5},
    "round.replace_after_s": {"round.replace_after_s": 5.0},
    "round.attackers": {"round.attackers": 0.1},
    "round.encoding": {"round.encoding": "int8"},
    "round.served": {"round.served": "zstd"},
    "server.max_update_norm": {"server.max_update_norm": 1e6},
    "train.finish_stop": {"train.finish": "auto", "train.finish_stop": "fleet", "train.validation": 0.2},
    "train.score_after": {"train.score_after": [1]},
    "train.mixed_precision": {"train.mixed_precision": "bf16"},
}  # fmt: skip


@pytest.fixture(scope="module")
def shards() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {f"site-{n}": (rng.random((24, 3, 3, 1), dtype=np.float32), np.arange(24) % 2) for n in range(6)}


def both(one: str, other: str) -> dict[str, Any] | None:
    """Return the settings of two features; None if they ask for two values of one setting."""
    first, second = FEATURES[one], FEATURES[other]
    differ = any(first[name] != second[name] for name in first.keys() & second.keys())
    return None if differ else USUAL | first | second


@pytest.mark.parametrize("one", FEATURES)
def test_each_pair_of_features_runs_or_is_refused_with_both_names(one: str, shards: dict[str, Any]) -> None:
    for first, other in combinations(FEATURES, 2):
        if first != one or (settings := both(one, other)) is None:
            continue
        try:
            attune.simulate(shards, seed=1, settings=settings, progress=False)
        except SettingError as error:
            for feature in (one, other):
                names = feature.partition(" = ")[0], f"method {FEATURES[feature].get('method.name')}"
                assert any(name in str(error) for name in names), (one, other)
