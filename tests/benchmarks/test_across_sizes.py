"""Sharing across sizes of networks: the averages by hand, and that a federation learns with each way."""

import pytest
import torch

from benchmarks import across_sizes as sizes
from benchmarks import across_sizes_tables as tables


def test_a_number_is_averaged_over_the_devices_that_have_it():
    small = torch.tensor([[[1.0]], [[3.0]]])  # two devices with one row and one column
    large = torch.tensor([[[2.0, 10.0], [0.0, 1.0]], [[6.0, 30.0], [4.0, 2.0]]])
    assert sizes.nested_mean(small, large).tolist() == [[[3.0, 20.0], [2.0, 1.5]]]


def test_prototypes_are_means_over_the_samples_of_all_devices():
    features = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 4.0]])
    means, known = sizes.prototypes(features, torch.tensor([0, 0, 2]), 3)
    assert means.tolist() == [[2.0, 1.0], [0.0, 0.0], [5.0, 4.0]]
    assert known.tolist() == [True, False, True]


@pytest.fixture(scope="module")
def fleet() -> dict[str, sizes.Half]:
    """Draw six devices of each size with two classes of images, one of them brighter on the left."""
    draw = torch.Generator().manual_seed(0)
    halves = {}
    for size in sizes.SIZES:
        y = torch.randint(0, 2, (6, 60), generator=draw)
        x = torch.randn(6, 60, 1, 16, 16, generator=draw)
        x[..., :8] += 2.0 * y[..., None, None, None]
        halves[size] = sizes.Half(x[:, :40], y[:, :40], x[:, 40:], y[:, 40:])
    return halves


@pytest.mark.parametrize(("base", "averaged"), [("shared", sizes.Nested), ("size", sizes.Within)])
def test_without_steps_a_generated_round_is_the_average_of_its_base(fleet, base, averaged):
    draw = torch.Generator().manual_seed(1)
    nets = {size: sizes.initial(size, half.x, 2, draw) for size, half in fleet.items()}
    runs = sizes.Generated(nets, {"base": base, "server_lr": 0.0}), averaged(nets, {})
    for run in runs:
        for _ in range(2):
            torch.manual_seed(2)
            run.close({size: sizes.trained(run.served()[size], half, 0.05, 1) for size, half in fleet.items()}, fleet)
    for size, network in runs[1].served().items():
        for name, tensor in network.items():
            torch.testing.assert_close(runs[0].served()[size][name], tensor, msg=f"{size} {name}")


def test_steps_follow_what_the_mean_leaves_of_a_device(fleet):
    """One device's change differs from the others': its step must take its side, and the others' must not."""
    draw = torch.Generator().manual_seed(1)
    run = sizes.Generated(
        {size: sizes.initial(size, half.x, 2, draw) for size, half in fleet.items()}, sizes.BASES[1] | {"server_lr": 0.01}
    )
    for _ in range(30):
        nets = {size: {name: t.clone() for name, t in network.items()} for size, network in run.served().items()}
        nets["small"]["head.bias"][2, 0] += 1.0
        run.close(nets, fleet)
    steps = run.steps()["small"]["head.bias"][:, 0]
    assert steps[2] > 0 and steps[2] == steps.max() and steps.mean() < steps[2] / 2


@pytest.mark.parametrize("way", sizes.WAYS)
def test_each_way_learns(fleet, way):
    _, fine_tuned, settings = sizes.WAYS[way]
    made = sizes.federation(way, fleet, sizes.Task("", lambda *_: (), 40, 2, 10, (4,), 1), settings[2], 0, (4,))
    assert min(made[4, "head"].values()) > 90
    assert ((4, "10") in made) == fine_tuned


def test_the_table_has_means_and_the_gain_with_its_standard_error(tmp_path):
    rows = [(way, 50, 52) if way == tables.WITHIN else (way, 53, 53) for way in tables.WAYS]
    text = "task,way,part,seed,small,large\nt,FedProto,validation,,99,99\n"
    text += "".join(f't,"{way}",test,{seed},{pair[seed]},60\n' for way, *pair in rows for seed in (0, 1))
    (tmp_path / "rows.csv").write_text(text)
    made = list(tables.lines(tmp_path / "rows.csv"))
    assert "| FedAvg within the size, fine-tuned | 51.0 / 60.0 |" in made
    assert "| FedProto | +2.0 ± 1.0 |" in made
