"""Adapters on a frozen body compared with the full model: bytes of a round, the server's state, and accuracy.

`python -m benchmarks.adapters --data fashion_mnist.npz --out benchmarks/results/adapters.json` (needs peft). The body is a
Vision Transformer that is trained here first, on images of five classes that no device holds. Twelve devices hold images of the
other five classes, two or three classes each. The adapters are LoRA of rank 4 on the projections of every attention, and a
head. The learning rate is the same for all, unless `--rates` names several: then it is chosen for each method and kind of model
on a seed that is not reported.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import attune
from attune.common.models.body import load_body, names_of
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.common.plan import ModelSpec
from attune.common.wire.files import write_tensors
from attune.fedserver.home import ServerHome
from benchmarks.machine import machine

VIT = {"patch": 7, "width": 48, "depth": 2, "heads": 4, "mlp": 96}
BODY = "ATTUNE_BENCHMARK_BODY"  # the environment variable with the path of the body's weights
BODY_CLASSES, BODY_SAMPLES, BODY_EPOCHS = 5, 10_000, 4
DEVICES, TRAIN, TEST, ROUNDS = 12, 40, 60, 6
RANK = 4
RATE = 0.1
CHOSEN_ON, SEEDS = 100, (0, 1)
METHODS = ("fedavg", "fedmcsa", "fedtp")
Shards = dict[str, tuple[Any, Any, Any, Any]]


def _vit(spec: ModelSpec) -> nn.Module:
    return build(ModelSpec("vit", "images", spec.shape, spec.classes, options=VIT), 0)


def _with_body(spec: ModelSpec) -> nn.Module:
    """Return the body, frozen, with a new head that is trained."""
    model = _vit(ModelSpec("vit", "images", spec.shape, BODY_CLASSES))
    load_body(model, os.environ[BODY])
    model.head = nn.Linear(VIT["width"], spec.classes)
    return model


def adapters(spec: ModelSpec) -> nn.Module:
    """Return the body with LoRA on every attention's projections."""
    from peft import LoraConfig, inject_adapter_in_model

    model = _with_body(spec)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["to_qkv"]), model)
    model.get_submodule("head").requires_grad_(True)
    return model


def head(spec: ModelSpec) -> nn.Module:
    """Return the frozen body with a new head."""
    return _with_body(spec)


def full(spec: ModelSpec) -> nn.Module:
    """Return the same body with all its weights trained."""
    return _with_body(spec).requires_grad_(True)


def new(spec: ModelSpec) -> nn.Module:
    """Return the same architecture with new weights."""
    return _vit(spec)


KINDS: dict[str, Callable[[ModelSpec], nn.Module]] = {"adapters": adapters, "head": head, "full": full, "new": new}


def train_body(x: Any, y: Any, where: Path) -> float:
    """Train the body on images (N, 28, 28) uint8 with labels from 0, and write it.

    Returns:
        Its accuracy on the last tenth, which is held out.
    """
    torch.manual_seed(0)
    model = _vit(ModelSpec("vit", "images", (28, 28, 1), BODY_CLASSES))
    x, y = torch.from_numpy(x).float().div(255)[:, None], torch.from_numpy(y).long()
    kept = len(x) // 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(BODY_EPOCHS):
        for some in torch.randperm(len(x) - kept).split(64):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(model(x[some]), y[some]))
            optimizer.step()
    write_tensors(where, model.state_dict())
    with torch.no_grad():
        return float((model.eval()(x[-kept:]).argmax(1) == y[-kept:]).double().mean())


def make_shards(x: Any, y: Any, seed: int) -> Shards:
    """Write shards with the classes that the body has not seen: two or three for each device, and no image on two devices."""
    draw, used = np.random.default_rng(seed), np.zeros(len(y), dtype=bool)
    classes, shards = np.unique(y), {}
    for number in range(DEVICES):
        own = draw.choice(classes, draw.integers(2, 4), replace=False)
        chosen = draw.permutation(np.flatnonzero(np.isin(y, own) & ~used))[: TRAIN + TEST]
        used[chosen] = True
        here_x, here_y = x[chosen][..., None], y[chosen]
        shards[f"device{number:02}"] = (here_x[:TRAIN], here_y[:TRAIN], here_x[TRAIN:], here_y[TRAIN:])
    return shards


def measure(kind: str, method: str, rate: float, shards: Shards, seed: int) -> dict[str, float]:
    """Measure one federation."""
    home, began = Path(tempfile.mkdtemp(prefix="attune-adapters-")), time.process_time()
    settings: dict[str, Any] = {"train.lr": rate, "train.local_epochs": 2, "train.batch_size": 20}
    try:
        result = attune.simulate(
            shards, method, f"benchmarks.adapters:{kind}", ROUNDS, seed, settings, home=home / "run", progress=False,
        )  # fmt: skip
        state = state_bytes(home / "run")
    finally:
        shutil.rmtree(home)
    accuracy = result.table().mean("accuracy")
    assert accuracy is not None, "every device has a test part"
    moved = result.bytes_moved / ROUNDS / DEVICES
    return {"accuracy": accuracy, "bytes": moved, "state_bytes": state, "processor_s": time.process_time() - began}


def rate_of(kind: str, method: str, rates: Sequence[float], shards_of: Callable[[int], Shards]) -> float:
    """Return the best of several rates on a seed that is not reported."""
    if len(rates) == 1:
        return rates[0]
    return max(rates, key=lambda rate: measure(kind, method, rate, shards_of(CHOSEN_ON), CHOSEN_ON)["accuracy"])


def row_of(kind: str, method: str, rates: Sequence[float], shards_of: Callable[[int], Shards]) -> dict[str, Any]:
    """Return one row with means over seeds."""
    rate = rate_of(kind, method, rates, shards_of)
    found = [measure(kind, method, rate, shards_of(seed), seed) for seed in SEEDS]
    return {
        "method": method,
        "model": kind,
        "lr": rate,
        "accuracy": round(statistics.mean(each["accuracy"] for each in found), 4),
        "accuracy_of_seeds": [round(each["accuracy"], 4) for each in found],
        "bytes_a_device_and_round": round(found[0]["bytes"]),
        "server_state_bytes": found[0]["state_bytes"],
        "processor_s": round(statistics.median(each["processor_s"] for each in found), 1),
    }


def sizes(models: Mapping[str, nn.Module]) -> dict[str, dict[str, int]]:
    """Count the trained and the frozen numbers of each kind of model."""
    return {
        kind: {
            "trained": sum(tensor.numel() for tensor in tensors_of(model).values()),
            "frozen": sum(tensor.numel() for name, tensor in model.state_dict().items() if name in names_of(model)),
        }
        for kind, model in models.items()
    }


def state_bytes(home: Path) -> int:
    """Return the bytes of the server's state at the end of the simulation with this home."""
    return sum(slot.size for slot in ServerHome(home / "server").snapshot().slots)


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True, help="Fashion-MNIST, .npz.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The JSON file to write.")
@click.option("--rates", type=float, multiple=True, help="A learning rate to choose from (repeat; default: 0.1).")
def main(data: Path, out: Path, rates: tuple[float, ...]) -> None:
    """Train the body, then every kind of model under every method."""
    torch.set_num_threads(1)
    with np.load(data) as file:
        x, y = file["train_x"], file["train_y"]
    seen = y < BODY_CLASSES
    with tempfile.TemporaryDirectory() as folder:
        os.environ[BODY] = str(Path(folder) / "body.safetensors")
        accuracy = train_body(x[seen][:BODY_SAMPLES], y[seen][:BODY_SAMPLES], Path(os.environ[BODY]))
        models = {kind: build(ModelSpec(f"benchmarks.adapters:{kind}", "images", (28, 28, 1), 5), 0) for kind in KINDS}
        found: dict[str, Any] = {"machine": machine(), "body_accuracy": round(accuracy, 4), "sizes": sizes(models), "rows": []}
        click.echo(found)
        for method in METHODS:
            for kind in KINDS:
                if (method, kind) != ("fedtp", "head"):  # no weights to generate
                    found["rows"].append(
                        row_of(kind, method, rates or [RATE], lambda seed: make_shards(x[~seen], y[~seen], seed))
                    )
                    click.echo(found["rows"][-1])
                    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
