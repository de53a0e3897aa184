"""Pairs of features: each runs two rounds, or is refused with both names when the server starts."""

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attune
from attune.common.errors import SettingError

USUAL = {
    "model.name": "mlr", "method.name": "fedavg", "round.rounds": 2, "round.analytic": "off", "train.local_epochs": 1,
    "data.classes": [0, 1], "privacy.devices": 6, "privacy.noise": 1.0, "privacy.insecure_seed": 1,
}  # fmt: skip
NEEDED = {"privacy.secure_aggregation"}  # refusals may name it in place of the feature that needs it
FEATURES: dict[str, dict[str, Any]] = {
    "model.variant": {"model.variant": [{"name": "small", "model": "dnn", "hidden": [4]}]},
    "privacy.secure_aggregation": {"privacy.secure_aggregation": True},
    **{f'privacy.unit = "{unit}"': {"privacy.unit": unit} for unit in ("client", "example", "group")},
    "privacy.same_cohort": {"privacy.secure_aggregation": True, "privacy.same_cohort": True},
    "survival": {"data.task": "survival", "data.classes": []},
    'round.mode = "buffered"': {"round.mode": "buffered", "round.buffer": 5},
    **{f'method.embedding = "{kind}"': {"method.name": "pfedhn", "method.embedding": kind} for kind in ("device", "described")},
    "method analytic": {"method.name": "analytic", "model.name": "closed-form"},
    **{f"method {name}": {"method.name": name} for name in ("ditto", "fedamp")},
    "round.patience": {"round.patience": 1, "train.validation": 0.2},
    "method.dial": {"method.name": "fedmcsa", "method.dial": True},
    'round.train = "all"': {"round.train": "all", "round.clients": 5},
    "round.over_selection": {"round.over_selection": 0.2, "round.clients": 5},
    "server.max_update_norm": {"server.max_update_norm": 1e6},
    "train.score_after": {"train.score_after": [1]},
}  # fmt: skip
SINGLE = {
    "method.robust": "median", "method.bound_change": 3.0, "method.bound_samples": 5.0, "method.shared_optimiser": "adam",
    "round.analytic": "auto", "round.take_back": 10.0, "round.adapt_rounds": 1, "round.quorum": 5, "round.replace_after_s": 5.0,
    "round.attackers": 0.1, "round.encoding": "int8", "round.served": "zstd", "train.mixed_precision": "bf16",
}  # fmt: skip
FEATURES |= {name: {name: value} for name, value in SINGLE.items()}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Return the folders of six sites for each task, whose samples are of groups of three."""
    rng, shards, y = np.random.default_rng(3), dict[str, dict[str, Path]](), np.arange(24) % 2
    for task in ("classes", "survival"):
        shards[task] = {f"site-{n}": tmp_path_factory.mktemp(f"{task}-{n}") for n in range(6)}
        for folder in shards[task].values():
            x, values = rng.random((24, 3, 3, 1), dtype=np.float32), y if task == "classes" else np.c_[1 + rng.random(24), y]
            np.savez(folder / "train.npz", x=x, y=values, person=np.arange(24) // 3)
            (folder / "meta.json").write_text(f'{{"task": "{task}", "groups": "person"}}')
    return shards


def both(one: str, other: str) -> dict[str, Any] | None:
    """Return the settings of two features; None if they ask for two values of one setting."""
    first, second = FEATURES[one], FEATURES[other]
    differ = any(first[name] != second[name] for name in first.keys() & second.keys())
    return None if differ else USUAL | first | second


@pytest.mark.parametrize("one", FEATURES)
def test_each_pair_of_features_runs_or_is_refused_with_both_names(one: str, shards: dict[str, dict[str, Path]]) -> None:
    for first, other in combinations(FEATURES, 2):
        if first != one or (settings := both(one, other)) is None:
            continue
        try:
            sites = shards[settings.get("data.task", "classes")]
            variants = dict.fromkeys(list(sites)[:3], "small") if "model.variant" in settings else {}
            attune.simulate(sites, seed=1, settings=settings, variants=variants, progress=False)
        except SettingError as error:
            for feature in (one, other):
                settings, name = FEATURES[feature], feature.partition(" = ")[0]
                names = name, f"method {settings.get('method.name')}", *settings.keys() & NEEDED
                assert any(name in str(error) for name in names), (one, other)


def test_a_simulation_has_no_tags_and_does_not_wait_for_them(shards: dict[str, dict[str, Path]]) -> None:
    with pytest.raises(SettingError, match="those of a simulation have no tags"):
        attune.simulate(shards["classes"], settings=USUAL | {"round.devices": "tag:icu"}, progress=False)
