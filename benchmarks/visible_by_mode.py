"""Attacks on privacy in each mode: what the server, or another device, computes from what the protocol shows it.

`python -m benchmarks.visible_by_mode --out benchmarks/results/visible_by_mode.csv`. The attacker reads the home of a real
(simulated) server after one round of FedAvg: the value that was served, what each device has handed in, and the next value. In
the modes `plain` and `example` it has each device's update. Under secure aggregation what devices hand in is masked, so it has
their sum, which is in the next value. With client-level privacy the server is trusted, so the attacker is another device, and
has the next value too. With the embedding on the device it has the gradient of the network that makes each device's model, and
computes the model from it. The attacks are those of benchmarks/visible.py.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

from attune import simulate
from attune.common.methods.hypernetwork import heads_of
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.common.statistics import student
from attune.common.wire.files import read_tensors
from attune.fedserver.home import ServerHome

Array = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]
Tensors = Mapping[str, Array]

FEATURES, PIXELS = 64, 784  # of a small table, and of an image of 28 x 28
CLASSES, DEVICES, RATE, EPSILON = 3, 5, 0.05, 4.0
MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "example": {"unit": "example", "epsilon": EPSILON},
    "client": {"unit": "client", "epsilon": EPSILON, "delta": 0.01, "devices": DEVICES},
    "secure": {"secure_aggregation": True},
    "embedding": {},  # of pFedHN, on the device; without a secure sum
}
SINGLE = ("plain", "example", "embedding")  # modes in which the attacker has the update of each device
NOISY, DRAWS = ("example", "client"), 8
FEDERATIONS = 20  # draws of the inputs for an interval
ATTACKERS = {"client": "another device"}
ONE_STEP = {"batch_size": 512, "lr": RATE, "local_epochs": 1, "momentum": 0.0, "clip_norm": 0.0}
COUNTS = ((40, 12, 3), (5, 30, 20), (55, 1, 9), (1, 33, 2), (10, 10, 40))
MEMBERS, OTHERS = 60, 500
OVER, HALF = "correlation above chance", "half of its 95 % interval"
COLUMNS = ("mode", "attacker", "attack", "setting", "measure", "value")


@dataclass(frozen=True)
class Seen:
    """Knowledge of the attacker after a round: where each device began to train, and where it ended.

    Where the attacker has no single device, it has the values that were served and the next ones, under the name "".
    """

    start: Mapping[str, Tensors]
    trained: Mapping[str, Tensors]
    model: torch.nn.Module

    def changes(self) -> dict[str, Tensors]:
        return {who: {name: values[name] - self.start[who][name] for name in values} for who, values in self.trained.items()}


def watched(mode: str, parts: Sequence[tuple[Array, Labels]], train: Mapping[str, Any], draw: int = 1) -> Seen:
    """Run one round of FedAvg, or of pFedHN with the embedding on the device, and return what the attacker has seen.

    Args:
        mode: One of MODES.
        parts: x and y of each device.
        train: Settings of [train].
        draw: Seed of the noise, in modes that have noise.
    """
    with tempfile.TemporaryDirectory(prefix="attune-visible-") as folder:
        root = Path(folder)
        shards = [_written(root / f"d{number}", x, y) for number, (x, y) in enumerate(parts)]
        noise = {"insecure_seed": draw} if mode in NOISY else {}
        settings = {"privacy": {**MODES[mode], **noise}, "train": {**train, "validation": 0.0}}
        settings["data"] = {"classes": list(range(CLASSES))}
        if mode == "embedding":
            settings["method"] = {"embedding": "device"}
        method = "pfedhn" if mode == "embedding" else "fedavg"
        simulate(shards, method, "dnn", 1, 0, settings, home=root / "home", executor="sequential", progress=False)
        home = root / "home" / "server"
        plan = ServerHome(home).snapshot().plan
        assert plan is not None
        handed_in = {path.parent.name.rpartition("-")[2]: path for path in sorted(home.glob("inbox/train-1-*/*.safetensors"))}
        assert len(handed_in) == len(parts)
        model = build(plan.model, plan.seed).eval()
        part = "generated" if mode == "embedding" else "shared"
        served, after = (_values(home / "state" / f"{part}.value.{number}.safetensors") for number in (0, 1))
        if mode == "embedding":
            found = {name: _start_and_end(_values(path), served, tensors_of(model)) for name, path in handed_in.items()}
            starts, ends = ({name: both[place] for name, both in found.items()} for place in (0, 1))
            return Seen(starts, ends, model)
        trained = {name: _values(path) for name, path in handed_in.items()} if mode in SINGLE else {"": after}
        return Seen(dict.fromkeys(trained, served), trained, model)


def _start_and_end(gradient: Tensors, network: Tensors, model: Mapping[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
    """Return a device's model before and after it trained, from the network and the gradient that it handed in.

    The gradient of a head's bias is minus the change of the model, g. That of its weight is the outer product of g and the
    features of the embedding (FedTP eq. 7-10), so the product g^T W / g^T g gives the features, and they the model.
    """
    start, end = dict[str, Array](), dict[str, Array]()
    for head in heads_of(model, {"head": list(model)}):
        slope = gradient[f"phi/{head.bias}"]
        features = slope @ gradient[f"phi/{head.weight}"] / (slope @ slope)
        made = network[f"phi/{head.weight}"] @ features + network[f"phi/{head.bias}"]
        for values, all_rows in ((start, made), (end, made - slope)):
            pieces = np.split(all_rows, np.cumsum(head.sizes)[:-1])
            values |= {name: piece.reshape(model[name].shape) for name, piece in zip(head.names, pieces, strict=True)}
    return start, end


def _written(folder: Path, x: Array, y: Labels) -> str:
    folder.mkdir()
    np.savez(folder / "train.npz", x=x, y=y)
    np.savez(folder / "test.npz", x=x[:1], y=y[:1])
    (folder / "meta.json").write_text(json.dumps({"standardise": False}), encoding="utf-8")
    return str(folder)


def _values(path: Path) -> Tensors:
    return {name: tensor.double().numpy() for name, tensor in read_tensors(path).items()}


@dataclass(frozen=True)
class Rebuilt:
    """Rows that an attacker takes for inputs, beside the inputs that they can be of.

    A row of the first layer's change, divided by that of its bias, is a mean of the inputs to which its neuron reacts.

    Attributes:
        rows: (N, features).
        inputs: Those of the devices behind the change, (S, features).
        labels: Their classes, (S,).
        others: Inputs of the same distribution that nobody has, (200, features).
    """

    rows: Array
    inputs: Array
    labels: Labels
    others: Array

    @property
    def class_means(self) -> Array:
        """The mean input of each class, (CLASSES, features): what a sum tells of its inputs in any case."""
        return np.stack([self.inputs[self.labels == label].mean(0) for label in np.unique(self.labels)])


def rebuilt_rows(mode: str, samples: int, features: int, draw: int = 0) -> Iterator[Rebuilt]:
    """Yield what the attacker rebuilds from each change that it sees; another `draw` has other inputs."""
    draws = np.random.default_rng((samples, draw) if draw else samples)
    inputs, labels = [draws.normal(size=(samples, features)) / 4 for _ in range(DEVICES)], np.arange(samples) % CLASSES
    for who, change in watched(mode, [(x, labels) for x in inputs], ONE_STEP).changes().items():
        weight = next(name for name, values in change.items() if values.shape[-1:] == (features,))
        bias = change[f"{weight.rpartition('.')[0]}.bias"]
        used = np.abs(bias) > 1e-9
        behind = [x for number, x in enumerate(inputs) if who in ("", f"d{number}")]
        others = draws.normal(size=(200, features))
        yield Rebuilt(change[weight][used] / bias[used, None], np.concatenate(behind), np.tile(labels, len(behind)), others)


def inversion(mode: str, samples: int, features: int) -> tuple[float, float]:
    """Return how well inputs are rebuilt, and how well inputs that nobody has are "rebuilt" from the same rows, by chance.

    The figure is the correlation of an input with the row that is most like it, mean over all inputs of all devices. Which row
    that is, an attacker without the input does not know.
    """
    found = [(_best(seen.inputs, seen.rows), _best(seen.others, seen.rows)) for seen in rebuilt_rows(mode, samples, features)]
    best, chance = np.mean(found, axis=0)
    return float(best), float(chance)


def over_chance(mode: str, samples: int, features: int, federations: int = FEDERATIONS) -> dict[str, tuple[float, float]]:
    """Return by how much `inversion` is above its value by chance: mean and half the 95 % interval, over draws of the inputs.

    "class means" has the same figure of an attacker who knows the mean input of each class, and nothing else.
    """
    gains: dict[str, list[float]] = {"rebuilt": [], "class means": []}
    for draw in range(1, federations + 1):
        for seen in rebuilt_rows(mode, samples, features, draw):
            for name, known in zip(gains, (seen.rows, seen.class_means), strict=True):
                gains[name].append(_best(seen.inputs, known) - _best(seen.others, known))
    halves = {name: student(len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5 for name, values in gains.items()}
    return {name: (float(np.mean(values)), float(halves[name])) for name, values in gains.items()}


def _best(truth: Array, rebuilt: Array) -> float:
    rows = len(truth)
    return float(np.abs(np.corrcoef(truth, rebuilt)[:rows, rows:]).max(axis=1).mean())


def label_counts(mode: str) -> float:
    """Return the error of a device's counts of labels, in samples: the mean over classes and devices.

    The change of the last bias is rate x mean of (label - p), with p near 1 / CLASSES. Sums tell the counts of all devices, of
    which the attacker takes the same share for each.
    """
    draws = np.random.default_rng(0)
    centres = draws.normal(size=(CLASSES, FEATURES)) / 4
    parts = []
    for counts in COUNTS:
        y = np.repeat(np.arange(CLASSES), counts)
        parts.append((centres[y] + draws.normal(size=(len(y), FEATURES)) / 4, y))
    off = []
    for who, change in watched(mode, parts, ONE_STEP).changes().items():
        [bias] = [values for values in change.values() if values.shape == (CLASSES,)]
        shares = np.clip(bias / RATE + 1 / CLASSES, 0, None)
        if not shares.any():  # noise can make all of them negative: then the attacker takes the classes to be equal
            shares += 1
        for number, counts in enumerate(COUNTS):
            if who in ("", f"d{number}"):
                off.append(np.abs(shares / shares.sum() * sum(counts) - counts).mean())
    return float(np.mean(off))


def membership(mode: str) -> list[float]:
    """Return the area under the curve (AUC) by which training samples are told from others, for each draw of the noise.

    0.5 is guessing. After 20 epochs on labels at random, as in a hard task, a sample is taken for a member if its loss is low.
    """
    draws = np.random.default_rng(3)

    def some(count: int) -> tuple[Array, Labels]:
        return draws.normal(size=(count, FEATURES)) / 4, draws.integers(0, CLASSES, count)

    parts, (x, y) = [some(MEMBERS) for _ in range(DEVICES)], some(OTHERS)
    return [_area(mode, parts, x, y, draw) for draw in range(DRAWS if mode in NOISY else 1)]


def _area(mode: str, parts: Sequence[tuple[Array, Labels]], x: Array, y: Labels, draw: int) -> float:
    """Return the mean AUC over devices with one draw of the noise."""
    seen = watched(mode, parts, {"local_epochs": 20, "lr": 0.3}, draw)
    areas = []
    for who, values in seen.trained.items():
        seen.model.load_state_dict({name: torch.from_numpy(array).float() for name, array in values.items()})
        others = _losses(seen.model, x, y)
        for number, part in enumerate(parts):
            if who in ("", f"d{number}"):
                areas.append(float((_losses(seen.model, *part)[:, None] < others[None]).mean()))
    return float(np.mean(areas))


def _losses(model: torch.nn.Module, x: Array, y: Labels) -> Array:
    with torch.no_grad():
        scores = model(torch.from_numpy(x).float())
        losses: Array = torch.nn.functional.cross_entropy(scores, torch.from_numpy(y), reduction="none").double().numpy()
    return losses


def rows() -> Iterator[dict[str, object]]:
    """Yield the rows of the table."""
    for mode in MODES:
        for features, samples in product((FEATURES, PIXELS), (1, 4, 16)):
            setting = f"{features} features, batches of {samples}"
            for measure, value in zip(
                ("correlation", "correlation by chance"), inversion(mode, samples, features), strict=True
            ):
                yield _row(mode, "inversion", setting, measure, value)
        if mode not in SINGLE + NOISY:
            for features in (FEATURES, PIXELS):
                for name, figures in over_chance(mode, 16, features).items():
                    for measure, value in zip((OVER, HALF), figures, strict=True):
                        yield _row(mode, f"inversion by {name}", f"{features} features, batches of 16", measure, value)
        yield _row(mode, "label counts", "one step", "error in samples", label_counts(mode))
        areas = membership(mode)
        for measure, value in (("AUC, mean over draws of noise", float(np.mean(areas))), ("AUC, largest", max(areas))):
            yield _row(mode, "membership", f"20 epochs, {MEMBERS} samples of each device", measure, value)


def _row(mode: str, attack: str, setting: str, measure: str, value: float) -> dict[str, object]:
    cells = (mode, ATTACKERS.get(mode, "server"), attack, setting, measure, f"{value:.5g}")
    return dict(zip(COLUMNS, cells, strict=True))


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
def main(out: Path) -> None:
    """Carry out all attacks, and write their table."""
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows())


if __name__ == "__main__":
    main()
