"""Devices with inputs of another form in one federation: does fitting them to the plan's form help, and would more than that?

`python -m benchmarks.inputs --data /work/shared/data --seeds 0,1,2 --out benchmarks/results/inputs.csv`. Eight sites, of which
every second one has less: Fashion-MNIST at 14 x 14 instead of 28 x 28 pixels (`sizes`); UCI-HAR with the three channels of the
total acceleration of nine (`channels`), or with the last half of the steps (`lengths`). A row is the mean accuracy on the
sites' test parts, of all, of those with less and of those with more: scikit-learn and a network `alone`; `apart`, the sites of
one form among themselves; `fitted` to the larger form (data.fit), to the smaller one, or with a first layer that stays on each
site. Rows that begin with `plain` are of a loop in plain torch (FedAvg, scored after local training): `plain fitted`, to both
forms, `plain adapter` with a private linear map in front of the network of a site with less, which begins as the fitting, and
`plain mask` with channels that say what is there.
"""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor, nn

import attune
from attune.common.models.registry import build, default_spec
from attune.common.plan import Kind, ModelSpec, channel_weights
from attune.fedclient.data.kinds import fit_floats
from attune.fedclient.data.standardiser import Standardiser

SITES, TRAINED, TESTED, ROUNDS, EPOCHS, LR, BATCH = 8, 40, 200, 20, 3, 0.03, 32
NETWORK = {"channels": [8, 16], "hidden": [64]}
AXES = ["body x", "body y", "body z", "gyro x", "gyro y", "gyro z", "total x", "total y", "total z"]
SETTINGS = {"train.local_epochs": EPOCHS, "train.lr": LR, "model.name": "convnet"} | {
    f"model.{k}": v for k, v in NETWORK.items()
}
Array = np.ndarray[Any, Any]


@dataclass
class Site:
    """One site: arrays of both parts in its own form, and the names of its channels."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array
    names: list[str]
    has_less: bool


def fashion(data: Path, seed: int) -> list[Site]:
    """Return the sites of the task `sizes`, with classes by Dir(1)."""
    with np.load(data / "fashion-mnist" / "fashion_mnist.npz") as file:
        x, y = file["train_x"][..., None], file["train_y"].astype(np.int64)
    draw, sites = np.random.default_rng(seed), []
    for number in range(SITES):
        share = draw.dirichlet([1.0] * 10)[y]
        taken = draw.choice(len(y), TRAINED + TESTED, replace=False, p=share / share.sum())
        mine = x[taken]
        if number % 2:
            mine = mine.reshape(-1, 14, 2, 14, 2, 1).mean(axis=(2, 4)).round().astype(np.uint8)
        sites.append(Site(mine[:TRAINED], y[taken[:TRAINED]], mine[TRAINED:], y[taken[TRAINED:]], [], bool(number % 2)))
    return sites


def activities(data: Path, seed: int, channels: int, steps: int) -> list[Site]:
    """Return eight persons, every second one with the last `channels` and `steps` alone."""
    with np.load(data / "uci-har" / "uci_har.npz") as file:
        x, y, person, segment = file["x"], file["y"].astype(np.int64), file["subject"], file["segment"]
    draw, sites = np.random.default_rng(seed), []
    for number, one in enumerate(draw.permutation(np.arange(1, 31))[:SITES]):
        names, mine = AXES, x
        if number % 2:
            names, mine = AXES[-channels:], x[:, -steps:, -channels:]
        tested = segment % 4 == 0
        train, test = (draw.permutation(np.flatnonzero((person == one) & part)) for part in (~tested, tested))
        train = train[:TRAINED]
        sites.append(Site(mine[train], y[train], mine[test], y[test], names, bool(number % 2)))
    return sites


TASKS: Mapping[str, tuple[Callable[[Path, int], list[Site]], tuple[int, ...], tuple[int, ...], int]] = {
    "sizes": (fashion, (28, 28, 1), (14, 14, 1), 10),
    "channels": (lambda data, seed: activities(data, seed, 3, 128), (128, 9), (128, 3), 6),
    "lengths": (lambda data, seed: activities(data, seed, 9, 64), (128, 9), (64, 9), 6),
}


def written(sites: list[Site], folder: Path) -> dict[str, Path]:
    """Write the sites as shards."""
    for number, site in enumerate(sites):
        place = folder / f"site{number}"
        place.mkdir(parents=True)
        np.savez(place / "train.npz", x=site.x, y=site.y)
        np.savez(place / "test.npz", x=site.test_x, y=site.test_y)
        (place / "meta.json").write_text(json.dumps({"columns": site.names} if site.names else {}))
    return {f"site{number}": folder / f"site{number}" for number in range(len(sites))}


def simulated(shards: Mapping[str, Path], method: Any, seed: int, rounds: int, **settings: Any) -> dict[str, float]:
    """Return the accuracy of what each site keeps after a simulation; after method "alone" that of its ordinary models."""
    is_alone = method == "alone"
    result = attune.simulate(
        shards, "local" if is_alone else method, rounds=1 if is_alone else rounds, seed=seed, settings=SETTINGS | settings,
        progress=False, executor="stacked", baseline="alone" if is_alone else "none",
    )  # fmt: skip
    return {client["name"]: client["accuracy_alone" if is_alone else "accuracy_kept"] for client in result.status["clients"]}


def in_form(site: Site, spec: ModelSpec, masked: bool) -> list[Tensor]:
    """Return x of both parts, fitted and standardised as a network takes it, with channels for what is there if `masked`."""
    weights, parts = channel_weights(spec, site.x.shape[1:], site.names), (site.x, site.test_x)
    fits = [fit_floats((x / np.float32(255) if x.dtype == np.uint8 else x).astype(np.float32), spec, weights) for x in parts]
    if spec.kind == "images":
        return [torch.from_numpy(np.moveaxis(x, -1, 1).copy()) for x in fits]
    scale = Standardiser.fit(fits[0])
    done = [np.nan_to_num(scale.apply(x)).astype(np.float32) for x in fits]
    if masked:
        done = [np.concatenate([x, ~np.isnan(fit)], axis=-1).astype(np.float32) for x, fit in zip(done, fits, strict=True)]
    return [torch.from_numpy(x) for x in done]


def plain(sites: list[Site], shape: tuple[int, ...], classes: int, seed: int, rounds: int, more: str) -> list[float]:
    """Return the accuracy of each site after rounds of FedAvg in plain torch, with what `more` names beside the fitting."""
    kind: Kind = "images" if len(shape) == 3 else "series"
    names = AXES[-shape[-1] :] if kind == "series" else ["grey"]
    spec = ModelSpec("", kind, shape, classes, channels=names)
    built = default_spec(kind, (*shape[:-1], shape[-1] * 2) if more == "mask" else shape, classes, 0, "convnet", NETWORK, False)
    network, data = build(built, seed), [in_form(site, spec, more == "mask") for site in sites]
    shared, adapters, right = {name: value.clone() for name, value in network.state_dict().items()}, {}, [0.0] * len(sites)
    if more == "adapter":  # of pixels, else of channels or steps: what is filled up is near what is there
        axis = -1 if shape[-1] != min(site.x.shape[-1] for site in sites) else 1
        size = shape[0] * shape[1] if kind == "images" else data[0][0].shape[axis]
        adapters = {at: nn.Parameter(torch.eye(size)) for at, site in enumerate(sites) if site.has_less}

    def seen(at: int, x: Tensor) -> Tensor:
        if at not in adapters:
            return x
        if kind == "images":
            return (x.flatten(1) @ adapters[at].T).reshape(x.shape)
        return x @ adapters[at].T if axis == -1 else torch.einsum("st,ntc->nsc", adapters[at], x)

    for round_ in range(rounds):
        handed: list[dict[str, Tensor]] = []
        for at, (site, (x, test_x)) in enumerate(zip(sites, data, strict=True)):
            network.load_state_dict(shared)
            step = torch.optim.SGD([*network.parameters(), *([adapters[at]] if at in adapters else [])], lr=LR, momentum=0.9)
            draw, y = np.random.default_rng([seed, round_, at]), torch.from_numpy(site.y)
            network.train()
            for _ in range(EPOCHS):
                for batch in np.array_split(draw.permutation(len(x)), -(-len(x) // BATCH)):
                    step.zero_grad()
                    nn.functional.cross_entropy(network(seen(at, x[batch])), y[batch]).backward()
                    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                    step.step()
            handed.append({name: value.clone() for name, value in network.state_dict().items()})
            if round_ == rounds - 1:
                network.eval()
                with torch.no_grad():
                    right[at] = float((network(seen(at, test_x)).argmax(1).numpy() == site.test_y).mean())
        shared = {name: torch.stack([of[name].float() for of in handed]).mean(0).to(shared[name].dtype) for name in shared}
    return right


@click.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, help="Folder with fashion-mnist and uci-har.")
@click.option("--seeds", default="0", show_default=True)
@click.option("--tasks", default=",".join(TASKS), show_default=True)
@click.option("--rounds", type=int, default=ROUNDS, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False))
def main(data: Path, seeds: str, tasks: str, rounds: int, out: Path | None) -> None:
    """Run each task with each seed, and write a row for each way."""
    rows: list[tuple[Any, ...]] = [("task", "seed", "way", "rounds", "accuracy", "with_less", "with_more")]
    for task in tasks.split(","):
        make, large, small, classes = TASKS[task]
        for seed in map(int, seeds.split(",")):
            sites = make(data, seed)

            def note(
                way: str, value: Mapping[str, float], sites: list[Site] = sites, task: str = task, seed: int = seed
            ) -> None:
                less, more = ([value[f"site{at}"] for at, of in enumerate(sites) if of.has_less == so] for so in (True, False))
                rows.append((task, seed, way, rounds, *(round(fmean(of), 4) for of in ([*less, *more], less, more))))
                click.echo(",".join(map(str, rows[-1])))

            with tempfile.TemporaryDirectory() as folder:
                shards = written(sites, Path(folder))
                forms = [{name: path for name, path in shards.items() if int(name[4:]) % 2 == odd} for odd in (0, 1)]
                for way, known in (("scikit-learn alone", "alone"), ("network alone", "local"), ("apart", "fedavg+ft")):
                    note(way, {name: value for form in forms for name, value in simulated(form, known, seed, rounds).items()})
                first_private = {"name": "custom", "parts": {"conv0.*": "private", "*": "shared"}}
                for way, shape, method in (
                    ("fitted", large, "fedavg+ft"),
                    ("fitted to the smaller form", small, "fedavg+ft"),
                    ("fitted, first layer private", large, first_private),
                ):
                    names = {} if shape[-1] == 1 else {"data.columns": AXES[-shape[-1] :]}
                    done = simulated(shards, method, seed, rounds, **{"data.fit": True, "data.shape": list(shape)}, **names)
                    note(way, done)
            for more in ("fitted", "fitted to the smaller form", "adapter", *(["mask"] if task != "sizes" else [])):
                shape = small if "smaller" in more else large
                note(f"plain {more}", dict(zip(shards, plain(sites, shape, classes, seed, rounds, more), strict=True)))
    if out is not None:
        with out.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
