"""The benchmarks of simulations, in small: each figure is what its name says. How fast it was is not tested."""

import numpy as np
import pytest

from attune.fedclient.work.stacked.lockstep import Stacked
from benchmarks import long_simulation
from benchmarks.contenders import task
from benchmarks.stacked import CASES, Device

# --- a whole experiment


def test_only_stacked_training_counts_as_training():
    timed, devices = long_simulation.Timed(), [Device(CASES["MLR 60 x 10"], number) for number in range(2)]
    timed.run([each.evaluation() for each in devices])
    assert timed.training_s == 0.0
    trained = timed.run([each.training() for each in devices])
    assert timed.training_s > 0.0
    plain = Stacked().run([each.training() for each in devices])
    assert [each.loss for each in trained] == [each.loss for each in plain]


# --- beside others


@pytest.mark.parametrize(("name", "rounds"), [("linear", 5), ("cnn", 20)])
def test_the_task_of_all_contenders_can_be_learned(tmp_path, name, rounds):
    task.write(tmp_path / "data.npz", 2, task.SHAPES[name])
    devices = task.tensors(tmp_path / "data.npz")
    assert [tuple(map(len, device)) for device in devices] == [(150, 150, 50, 50)] * 2
    net = task.model(devices[0][0].shape[1:])
    before = task.accuracy(net.state_dict(), devices)
    for round_ in range(rounds):
        task.train(net, *devices[0][:2], seed=round_)
    assert task.accuracy(net.state_dict(), devices) > before + 0.2
    drawn = [some.tolist() for some in task.batches(150, task.torch.Generator().manual_seed(0))]
    assert len(drawn) == task.STEPS and sorted(np.concatenate(drawn[:8]).tolist()) == list(range(150))


# --- the benchmark of stacked training: every way trains the same devices, and all cases can be stacked
