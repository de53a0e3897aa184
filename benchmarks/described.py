"""First model of a device before its first round: embeddings from descriptions of data (`method.embedding = "described"`).

`python -m benchmarks.described --data fashion_mnist.npz --out benchmarks/results/described.csv` trains FedTP on 50 devices of
Fashion-MNIST (Dirichlet 0.3, at most 80 images each) and gives 20 further devices their first model in several ways; without
--data, 20 and 5 devices of digits. A row is a way and a seed: the mean accuracy over the newcomers' test parts. Nothing about a
newcomer is used but moments of its unlabelled training inputs; "fitted" and "labels" are bounds, which use its labels.

The bandwidth is chosen as in the product, by leaving out trained devices. The rows "b = ..." say what each bandwidth
would have given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy

import attune
from attune.common.methods.hypernetwork import features, generated, heads_of
from attune.common.methods.method import assign
from attune.common.methods.registry import configured_in
from attune.common.models.feature_mean import moments
from attune.common.models.registry import build
from attune.common.models.structure import components_by_part
from attune.common.plan import Plan
from attune.common.wire.files import read_tensors, write_tensors
from attune.common.wire.tensors import Tensors
from attune.fedclient.work.objectives.base import Network
from attune.fedserver.lab.aggregators.described import BANDWIDTHS, DescriptionRegression
from attune.fedserver.lab.engine import Engine
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import partition
from benchmarks.recipes import cuts
from benchmarks.result_file import Results

SETTINGS: dict[str, Any] = {"train.local_epochs": 2, "train.evaluate": False, "train.validation": 0, "round.evaluate_every": 0}
FIT_STEPS, FIT_RATE = 100, 0.1  # of Adam on all of a newcomer's samples, through the frozen network
AT_ONCE = 256
INITIAL, NETWORK, EMBEDDINGS = "initial/", "network/", "embeddings/"
FIRST = "first features"  # the description of the product
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # train_x, train_y, test_x, test_y


class Served:
    """Models that a trained federation serves, one for each embedding.

    Args:
        plan: Its plan.
        tensors: Of the server's state: the shared part; INITIAL and NETWORK before the names of the generated part's first
            values and of the hypernetwork's; and EMBEDDINGS of the trained devices (N, E), sorted by name.
    """

    def __init__(self, plan: Plan, tensors: Tensors) -> None:
        model = build(plan.model, plan.seed)
        self.network = Network(model)
        model.eval()
        self.z_NE = tensors[EMBEDDINGS]
        self._shared = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        self._initial, self._hypernetwork = (
            {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in (INITIAL, NETWORK)
        )
        components = components_by_part(model, assign(configured_in(plan).method, model))["generated"]
        self._heads = heads_of(self._initial, components)

    @staticmethod
    def state(result: Any, rounds: int) -> Tensors:
        """Return the tensors of a finished simulation."""
        engine = Engine(result._plan, result._outcome.snapshot.slots, result._state.storage.blobs, rounds)
        state = engine.groups.of("", "generated").aggregator._load()  # type: ignore[attr-defined]
        shared = {name: tensor.clone() for name, tensor in engine.groups.of("", "shared").vault.read("value").items()}
        initial = {f"{INITIAL}{name}": tensor for name, tensor in state.initial.items()}
        network = {f"{NETWORK}{name}": tensor for name, tensor in state.network.items()}
        return shared | initial | network | {EMBEDDINGS: state.embeddings.values(sorted(result.devices))}

    def emitted(self, z_NE: Tensor) -> Tensor:
        """Return the network's output (N, H) before its heads."""
        return features(self._hypernetwork, z_NE)

    def tensors(self, z_E: Tensor) -> Tensors:
        """Return the model of an embedding."""
        [weights] = generated(self._hypernetwork, self._heads, self._initial, z_E[None])
        return self._shared | weights

    def accuracy(self, z_E: Tensor, x: Tensor, y: Tensor) -> float:
        with torch.no_grad():
            return float((self.network(self.tensors(z_E), x).argmax(dim=1) == y).float().mean())

    def fitted(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the embedding that fits a device's labelled samples, from the mean."""
        z_E: Tensor = self.z_NE.mean(dim=0).clone().requires_grad_()
        adam = torch.optim.Adam([z_E], lr=FIT_RATE)
        for _ in range(FIT_STEPS):
            adam.zero_grad()
            cross_entropy(self.network(self.tensors(z_E), x), y).backward()
            adam.step()
        return z_E.detach()


def images(x: np.ndarray) -> Tensor:
    """Return images (N, H, W, C) or (N, H, W) as the model takes them, (N, C, H, W) in [0, 1]."""
    tensor = torch.from_numpy(x).float().div(255 if x.dtype == np.uint8 else 1)
    return tensor[:, None] if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)


def descriptions(served: Served, devices: Mapping[str, Arrays], classes: int) -> dict[str, Tensor]:
    """Return descriptions (N, M) by kind. That of the product is "first features"; "labels" is a bound."""
    network, mean_E = served.network, served.z_NE.mean(dim=0)
    common = served.tensors(mean_E)
    kinds: dict[str, Callable[[Tensor, Tensor], list[float]]] = {
        FIRST: lambda x, _: moments(torch.split(x, AT_ONCE), lambda part: network.with_features({}, part)[1]),
        "common model's features": lambda x, _: moments([x], lambda part: network.with_features(common, part)[1]),
        "common model's answers": lambda x, _: network(common, x).softmax(dim=1).mean(dim=0).tolist(),
        "coarse pixels": lambda x, _: moments([x], lambda part: avg_pool2d(part, part.shape[-1] // 4).flatten(1)),
        "labels": lambda _, y: (torch.bincount(y, minlength=classes) / len(y)).tolist(),
    }
    given = [(images(one[0]), torch.from_numpy(one[1]).long()) for one in devices.values()]
    with torch.no_grad():
        return {name: torch.tensor([kind(x, y) for x, y in given], dtype=torch.float64) for name, kind in kinds.items()}


def rows(served: Served, old: Mapping[str, Arrays], new: Mapping[str, Arrays], classes: int) -> dict[str, tuple[float, str]]:
    """Return accuracy and bandwidth of each way."""
    tests = [(images(one[2]), torch.from_numpy(one[3]).long()) for one in new.values()]
    trained = [(images(one[2]), torch.from_numpy(one[3]).long()) for one in old.values()]
    trains = [(images(one[0]), torch.from_numpy(one[1]).long()) for one in new.values()]

    def score(z_SE: Tensor) -> float:
        return fmean(served.accuracy(z_E, x, y) for z_E, (x, y) in zip(z_SE, tests, strict=True))

    own = fmean(served.accuracy(z_E, x, y) for z_E, (x, y) in zip(served.z_NE, trained, strict=True))
    most = [int(y.mode().values) for _, y in trains]
    constant = fmean(float((y == label).float().mean()) for (_, y), label in zip(tests, most, strict=True))
    found = {
        "trained devices": (own, ""),
        "constant answer": (constant, ""),
        "mean embedding": (score(served.z_NE.mean(dim=0).expand(len(new), -1)), ""),
        "fitted": (score(torch.stack([served.fitted(x, y) for x, y in trains])), ""),
    }  # fmt: skip
    of_old, of_new = descriptions(served, old, classes), descriptions(served, new, classes)
    for name, known_NM in of_old.items():
        with torch.no_grad():
            regression = DescriptionRegression(known_NM, served.z_NE, served.emitted)
            ways = {name: regression.bandwidth}
            if name == FIRST:
                ways |= {f"{name}, b = {bandwidth:g}": bandwidth for bandwidth in BANDWIDTHS}
            for way, bandwidth in ways.items():
                regression.bandwidth = bandwidth
                z_SE = torch.stack([regression.embedding(said_M) for said_M in of_new[name]])
                found[way] = (score(z_SE), f"{bandwidth:g}")
                if way == FIRST:
                    regression.bandwidth = math.inf
                    found["mean output"] = (score(regression.embedding(of_new[name][0])[None].expand(len(new), -1)), "")
                    regression.bandwidth = bandwidth
                    mixed_SE = torch.stack([regression.mean_embedding(said_M) for said_M in of_new[name]])
                    found[f"{name}, mean of embeddings"] = (score(mixed_SE), f"{bandwidth:g}")
    return found


def trained(devices: Mapping[str, Arrays], key: Mapping[str, Any], seed: int, rounds: int, states: Path | None) -> Served:
    """Return the trained federation: that of a file in `states`, if there is one, or a new one, which is written there."""
    name = "-".join(map(str, key.values()))
    plan = states / f"{name}.json" if states else None
    if plan and plan.exists():
        return Served(msgspec.json.decode(plan.read_bytes(), type=Plan), read_tensors(plan.with_name(f"{name}.safetensors")))
    result = attune.simulate(devices, "fedtp", None, rounds, seed, SETTINGS, executor="stacked", progress=False)
    state = Served.state(result, rounds)
    if plan:  # it is written last: then the tensors are whole
        plan.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(plan.with_name(f"{name}.safetensors"), state)
        plan.write_bytes(msgspec.json.encode(result._plan))
    return Served(result._plan, state)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The CSV file.")
@click.option("--data", type=click.Path(path_type=Path, exists=True), help="Fashion-MNIST; without it, digits.")
@click.option("--devices", type=int, help="Devices that train (default: 50, of digits 20).")
@click.option("--rounds", default=40, show_default=True)
@click.option("--samples", default=80, show_default=True, help="Training samples of a device, at most.")
@click.option("--alpha", default=0.3, show_default=True)
@click.option("--seed", "seeds", type=int, multiple=True, default=(0, 1, 2), show_default=True)
@click.option("--states", type=click.Path(path_type=Path), help="Folder of trained federations, which are not trained again.")
def main(
    out: Path, data: Path | None, devices: int | None, rounds: int, samples: int, alpha: float, seeds: tuple[int, ...],
    states: Path | None,
) -> None:  # fmt: skip
    """Run the seeds that the file does not have."""
    torch.set_num_threads(1)
    task, newcomers = ("fashion-mnist", 20) if data else ("digits", 5)
    founders = devices or (50 if data else 20)
    results = Results(
        out, ["task", "devices", "newcomers", "samples", "alpha", "rounds", "seed", "way", "bandwidth", "accuracy"]
    )
    for seed in seeds:
        key = {"task": task, "devices": founders, "samples": samples, "alpha": alpha, "rounds": rounds, "seed": seed}
        if any(all(row[name] == str(value) for name, value in key.items()) for row in results.rows()):
            continue
        whole = load_dataset(str(data) if data else "digits")
        parts = cuts.fewer(partition(whole, "dirichlet", founders + newcomers, seed, alpha=alpha), samples, seed)
        shards = {
            f"d{client:02}": (*parts.arrays(client, "train"), *parts.arrays(client, "test"))
            for client in range(founders + newcomers)
        }
        old = {name: shards[name] for name in sorted(shards)[:founders]}
        new = {name: shards[name] for name in sorted(shards)[founders:]}
        served = trained(old, key, seed, rounds, states)
        found = rows(served, old, new, len(whole.classes))
        for way, (accuracy, bandwidth) in found.items():
            results.add([key | {"newcomers": newcomers, "way": way, "bandwidth": bandwidth, "accuracy": round(accuracy, 4)}])
            click.echo(f"{task} {seed} {way} {bandwidth}: {accuracy:.3f}")


if __name__ == "__main__":
    main()
