"""A start near the present one, from which a secure sum may be made again."""

import numpy as np
import torch

from attune.fedserver.lab.groups import moved
from tests.fedserver.bench import Bench, plan


def numbers(tiny: Bench) -> np.ndarray:
    """Return all numbers that a client is served."""
    parts = tiny.engine.serve(["a"])["a"]
    return np.concatenate(
        [tensor.double().numpy().ravel() for part in sorted(parts) for tensor in tiny.read(parts[part]).values()]
    )


def test_another_start_is_near_the_present_one_and_a_restart_makes_the_same(tmp_path):
    tiny = Bench(tmp_path, plan())
    tiny.close(a=(0.5, 1), b=(0.1, 1), c=(0.2, 1))
    before, outcomes = numbers(tiny), []
    for _ in range(2):
        outcomes.append(tiny.engine.another_start().slots)
        tiny.restart()
    assert outcomes[0] == outcomes[1] and outcomes[0]
    assert np.array_equal(numbers(tiny), before), "not committed"
    tiny.engine.another_start()
    tiny.closed += 1
    tiny.commit()
    after = numbers(tiny)
    assert np.mean(after != before) > 0.9
    np.testing.assert_allclose(after, before, rtol=0.0101)


def test_a_start_of_zeros_moves_too_and_no_sign_changes():
    tensors = {"zeros": torch.zeros(50), "variance": torch.full((50,), 1e-9), "counter": torch.tensor(3)}
    near = moved(tensors, 7)
    assert 0 < near["zeros"].abs().max() <= 1e-3
    assert near["variance"].min() > 0 and near["counter"] == 3
    assert all(torch.equal(near[name], moved(tensors, 7)[name]) for name in near)
    assert not torch.equal(near["zeros"], moved(tensors, 8)["zeros"])
