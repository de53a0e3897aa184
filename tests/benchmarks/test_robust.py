"""Attackers act as the table says: an attack reaches the aggregation, and honest devices are not changed."""

import numpy as np
import pytest

from benchmarks.robust import FLIP, NOISE, REPLACEMENT, Attack, Data, run

DEVICES = 4
OFF = {"method.bound_change": 0.0, "method.bound_samples": 0.0}


@pytest.fixture(scope="module")
def data() -> Data:
    rng = np.random.default_rng(0)

    def part(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(count) % 3
        return (rng.normal(size=(count, 6)) + 3 * np.eye(3, 6)[y]).astype(np.float32), y

    return Data("drawn", 3, {f"device{n}": (*part(30), *part(12)) for n in range(DEVICES)})


@pytest.mark.parametrize("kind", [FLIP, NOISE, REPLACEMENT])
def test_an_attack_costs_the_honest_devices_something_where_nothing_bounds_it(data: Data, kind: str) -> None:
    attackers = data.attackers(0.25)
    usual = run(data, "fedavg", OFF, Attack("none", frozenset(), DEVICES), 2, 0)
    found = run(data, "fedavg", OFF, Attack(kind, attackers, DEVICES), 2, 0)
    honest = found.keys() - attackers
    assert len(honest) == DEVICES - 1
    change = sum(found[name] - usual[name] for name in honest)
    assert change < -0.3


# --- committed rows of the server's optimisers: each was tested with the rates that were best on validation parts
