"""Attacks on privacy by the server and by another device: what each computes of a device's data from what it hands in.

`python -m benchmarks.visible --out benchmarks/results/visible.csv`. The attacker has what it is sent: the served tensors, the
tensors that the device hands in, and the numbers of samples. It follows the protocol. The attacks are the known ones: labels
from the gradient of the last bias (Yin et al., CVPR 2021), inputs from the first layer, whose gradient is the input times that
of the bias (Phong et al., IEEE TIFS 2018), and membership by the loss (Yeom et al., CSF 2018).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import click
import numpy as np
import numpy.typing as npt
import torch

from attune import simulate
from attune.common.models.registry import build
from attune.common.plan import Columns, Profile
from attune.common.protocol import LOCAL_SCALE
from attune.fedclient.data.shard import column_sums
from attune.fedclient.work.learner import Learner
from attune.fedserver.core.scale import scales_of

Array = npt.NDArray[np.float64]
Rows = list[dict[str, object]]
FEATURES, CLASSES, RATE = 64, 3, 0.05
ONE_STEP = {"train.batch_size": 512, "train.lr": RATE, "train.local_epochs": 1, "train.momentum": 0.0, "train.validation": 0.0}
COLUMNS = ("attacker", "what", "setting", "measure", "value")


class Seen:
    """Values that each device was served and handed in, by device and round."""

    def __init__(self) -> None:
        self.start: dict[tuple[str, int], dict[str, Array]] = {}
        self.trained: dict[tuple[str, int], dict[str, Array]] = {}
        self.plan: Any = None

    def change(self, name: str, round_: int = 1) -> dict[str, Array]:
        before, after = self.start[name, round_], self.trained[name, round_]
        return {tensor: after[tensor] - before[tensor] for tensor in after}


def watched(shards: Mapping[str, Any], rounds: int, settings: Mapping[str, Any], spy: str = "") -> Seen:
    """Run a federation of FedAvg, and return what passed between its server and devices. `spy` hands in a random change."""
    seen, real = Seen(), Learner._written

    def written(self: Learner, part: Any, values: Any, before: Any, order: Any, *more: Any) -> Any:
        given = at_random(values, before) if self.name == spy else values
        seen.plan = self.plan
        for where, tensors in ((seen.start, before), (seen.trained, given)):
            where[self.name, order.round] = {name: tensors[name].double().numpy().copy() for name in values}
        return real(self, part, given, before, order, *more)

    with patch.object(Learner, "_written", written):
        simulate(shards, "fedavg", "dnn", rounds, 0, dict(settings), executor="sequential", progress=False)
    return seen


def at_random(theta: Mapping[str, torch.Tensor], received: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a change in random directions, as large as the one that training has made."""
    generator = torch.Generator().manual_seed(0)
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in received.items()}
    norms = {name: float((theta[name] - received[name]).norm() / noise[name].norm()) for name in noise}
    return {name: received[name] + norms[name] * noise[name] for name in noise}


def site(seed: int, counts: tuple[int, ...]) -> tuple[Array, npt.NDArray[np.int64], Array, npt.NDArray[np.int64]]:
    """Return x and y of a training part with so many samples of each class, and of a test part."""
    rng, centres = np.random.default_rng(seed), np.random.default_rng(0).normal(size=(CLASSES, FEATURES))
    parts = [np.repeat(np.arange(CLASSES), many) for many in (counts, (5,) * CLASSES)]
    (x, y), (test_x, test_y) = ((centres[part] + rng.normal(size=(len(part), FEATURES)), part) for part in parts)
    return x, y, test_x, test_y


def label_counts() -> Rows:
    """Estimate the counts of labels from the change of the last bias: rate x mean of (y - p), with p near 1 / CLASSES."""
    truth = ((40, 12, 3), (5, 30, 20), (55, 1, 9), (1, 33, 2))
    shards = {f"d{seed}": site(seed, counts) for seed, counts in enumerate(truth)}
    rows: Rows = []
    for tag, more in (("one step", {"train.clip_norm": 0.0}), ("one step, clipped by default", {})):
        seen = watched(shards, 1, ONE_STEP | more)
        off = []
        for seed, counts in enumerate(truth):
            change = seen.change(f"d{seed}")
            [bias] = [tensor for name, tensor in change.items() if tensor.shape == (CLASSES,)]
            shares = np.clip(bias / RATE + 1 / CLASSES, 0, None)
            off.append(np.abs(shares / shares.sum() * sum(counts) - counts).mean())
        rows.append(row("server", "counts of labels", tag, "mean error in samples", float(np.mean(off))))
    return rows


def inputs() -> Rows:
    """Rebuild samples from the first layer: each row of its change, divided by that of the bias, is a mean of inputs."""
    rows: Rows = []
    for count in (1, 4, 16):
        rng = np.random.default_rng(count)
        truth = rng.normal(size=(count, FEATURES))
        with TemporaryDirectory() as folder:
            few = Path(folder) / "few"
            few.mkdir()
            np.savez(few / "train.npz", x=truth, y=np.arange(count) % CLASSES)
            np.savez(few / "test.npz", x=truth[:1], y=np.zeros(1, np.int64))
            (few / "meta.json").write_text(json.dumps({"standardise": False}), encoding="utf-8")
            shards = {"few": few, "other": site(1, (9, 9, 9))}
            seen = watched(shards, 1, ONE_STEP | {"data.classes": list(range(CLASSES))})
        change = seen.change("few")
        weight = next(name for name, tensor in change.items() if tensor.shape[-1:] == (FEATURES,))
        bias = change[f"{weight.rpartition('.')[0]}.bias"]
        used = np.abs(bias) > 1e-9
        rebuilt = change[weight][used] / bias[used, None]
        best = [max((abs(np.corrcoef(one, sample)[0, 1]) for one in rebuilt), default=0.0) for sample in truth]
        rows.append(
            row("server", f"samples of a device with {count}", "one step", "correlation, mean of best", float(np.mean(best)))
        )
    return rows


def other_update() -> Rows:
    """Let one of two devices hand in a random change: its share in what is served next gives the other's samples and update."""
    spy, victim = site(0, (20, 20, 20)), site(1, (40, 12, 3))
    seen = watched({"spy": spy, "victim": victim}, 2, ONE_STEP, spy="spy")
    names = sorted(seen.change("victim"))

    def flat(tensors: Mapping[str, Array]) -> Array:
        return np.concatenate([tensors[name].ravel() for name in names])

    mean, mine = flat(seen.start["spy", 2]) - flat(seen.start["spy", 1]), flat(seen.change("spy"))
    share = float(mean @ mine / (mine @ mine))  # the other's change is nearly at a right angle to a random one
    samples = len(spy[0]) * (1 - share) / share
    found, true = (mean - share * mine) / (1 - share), flat(seen.change("victim"))
    who, setting = "other of two devices", "FedAvg, 2 devices"
    return [
        row(who, "update", setting, "correlation", float(np.corrcoef(found, true)[0, 1])),
        row(who, f"number of samples (true: {len(victim[0])})", setting, "samples", samples),
    ]


def target_mean() -> Rows:
    """Compute the other device's target mean from the common scale and one's own sums, where both disclose theirs."""
    rng = np.random.default_rng(0)
    parts = {name: rng.normal(mean, 12.0, size=(50, 1)) for name, mean in (("spy", 60.0), ("victim", 70.0))}
    sums = {name: column_sums(part) for name, part in parts.items()}

    def profile(columns: Columns | None) -> Profile:
        return Profile("tabular", (FEATURES,), ["dose"], 50, 0, task="regression", targets=columns)

    scale = scales_of({name: profile(columns) for name, columns in sums.items()}).targets
    assert scale is not None
    mean = 2 * scale.mean[0] - sums["spy"].mean[0]
    hidden = scales_of({name: profile(None) for name in sums}).targets
    what = "mean of the targets"
    return [
        row("other of two devices", what, "both disclose statistics", "error", abs(mean - float(parts["victim"].mean()))),
        row("other of two devices", what, f"default ({LOCAL_SCALE})", "scales sent", float(hidden is not None)),
    ]


def membership() -> Rows:
    """Tell training samples from others by their loss under the device's own model, after 20 epochs on labels at random."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(200, FEATURES)), rng.integers(0, CLASSES, 200)
    shards = {"victim": (x[:60], y[:60], x[60:70], y[60:70]), "other": site(1, (20, 20, 20))}
    seen = watched(shards, 1, {"train.local_epochs": 20, "train.lr": RATE, "train.validation": 0.0})
    model = build(seen.plan.model, seen.plan.seed)
    model.load_state_dict({name: torch.from_numpy(t).float() for name, t in seen.trained["victim", 1].items()}, strict=False)
    scaled = torch.from_numpy((x - x[:60].mean(0)) / x[:60].std(0)).float()
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model.eval()(scaled), torch.from_numpy(y), reduction="none").numpy()
    members, others = loss[:60], loss[70:]
    return [row("server", "membership", "20 epochs, 60 samples", "AUC", float((members[:, None] < others[None]).mean()))]


def row(attacker: str, what: str, setting: str, measure: str, value: float) -> dict[str, object]:
    return dict(zip(COLUMNS, (attacker, what, setting, measure, f"{value:.4g}"), strict=True))


ATTACKS = (label_counts, inputs, other_update, target_mean, membership)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(out: Path) -> None:
    """Carry out all attacks, and write their table."""
    rows = [entry for attack in ATTACKS for entry in attack()]
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
