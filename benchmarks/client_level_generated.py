"""Client-level privacy for generated parts: is FedTP with noise on its hypernetwork better than FedPer with noise?

`python -m benchmarks.client_level_generated fashion_mnist.npz --out benchmarks/results/client_level_generated.csv` simulates
1,000 devices of 60 images (Dirichlet 0.3): 40 for training, 10 to choose settings, 10 for the test. A round draws each device
with chance 0.05. All methods train the same Vision Transformer by the same code here; the product refuses this privacy for
generated parts.

The norm of a device's gradient of the hypernetwork is exact and needs no gradient of a single device. For device i, with the
change Delta_i of its generated weights, the network's output h_i, and the inputs a_ik and output gradients delta_ik of its
layers: |g_i|^2 = |Delta_i|^2 (|h_i|^2 + 1) + sum_k |delta_ik|^2 (|a_ik|^2 + 1). One backward pass gives all delta_ik.

Shapes: N devices, S of them in a round, B samples, E numbers of an embedding, H hidden units, R generated weights.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from attune.common.methods.method import PartKind, assign
from attune.common.methods.registry import get
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.common.plan import ModelSpec
from attune.common.privacy.accountant import noise_for

DEVICES, CLASSES, IMAGES, TRAIN, VALIDATION = 1000, 10, 60, 40, 10
DRAWN = 50  # devices of a round, on average
DELTA = 1 / (2 * DEVICES)
VIT = {"patch": 7, "width": 32, "depth": 2, "heads": 4, "mlp": 64}
SPREAD = 0.1  # how far generated weights start from the initial ones, as fedserver.lab.aggregators.network
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """Settings of one run. Clips are the largest norms that count; `noise` 0 is no privacy, and then nothing is clipped.

    Attributes:
        clip: Of a device's change of the shared part.
        clip_phi: Of a device's gradient of the hypernetwork.
        phi_lr: Learning rate of the hypernetwork.
        phi_optimiser: "adam" or "sgd" (with momentum 0.9).
    """

    method: str
    rounds: int = 200
    noise: float = 0.0
    clip: float = 1.0
    clip_phi: float = 1.0
    lr: float = 0.1
    epochs: int = 2
    batch: int = 20
    phi_lr: float = 1e-3
    phi_optimiser: str = "adam"
    hidden: int = 16
    embedding: int = 8
    seed: int = 0


def divided(images: np.ndarray, labels: np.ndarray, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (N, IMAGES, 1, 28, 28) and labels (N, IMAGES): each device draws its classes by Dirichlet(0.3)."""
    draw = np.random.default_rng(seed)
    pools = [list(draw.permutation(np.flatnonzero(labels == c))) for c in range(CLASSES)]
    rows = []
    for _ in range(DEVICES):
        shares = draw.dirichlet([0.3] * CLASSES)
        taken: list[int] = []
        while len(taken) < IMAGES:
            left = np.array([len(pool) > 0 for pool in pools])
            weights = np.where(left, shares + 1e-9, 0.0)
            taken.append(pools[int(draw.choice(CLASSES, p=weights / weights.sum()))].pop())
        rows.append(draw.permutation(taken))
    order = np.stack(rows)
    x = torch.from_numpy(images[order]).float().div(255).unsqueeze(2)
    return x, torch.from_numpy(labels[order].astype(np.int64))


class Hypernetwork:
    """W_i = heads(mlp(z_i)), with the sum of clipped gradients of its weights over a cohort."""

    def __init__(self, initial: Tensors, options: Options) -> None:
        draw = torch.Generator().manual_seed(options.seed)
        self.names, self.shapes = list(initial), [initial[name].shape for name in initial]
        self.sizes = [shape.numel() for shape in self.shapes]
        widths = [options.embedding, options.hidden, options.hidden]
        self.layers = [
            [torch.randn(o, i, generator=draw) * math.sqrt((2 if k else 1) / i), torch.zeros(o)]
            for k, (i, o) in enumerate(pairwise(widths))
        ]
        self.z_NE = torch.randn(DEVICES, options.embedding, generator=draw)
        bias_R = torch.cat([initial[name].reshape(-1) for name in self.names])
        scale_R = torch.cat(
            [torch.full((n,), float(initial[name].std())) for name, n in zip(self.names, self.sizes, strict=True)]
        )
        norm = math.sqrt(options.hidden)
        self.layers.append(
            [torch.randn(len(bias_R), options.hidden, generator=draw) * (SPREAD / norm) * scale_R[:, None], bias_R]
        )
        self.z_first, self.z_second, self.z_steps = (
            torch.zeros_like(self.z_NE),
            torch.zeros_like(self.z_NE),
            torch.zeros(DEVICES),
        )

    def inputs(self, z_SE: Tensor) -> list[Tensor]:
        """Return the input of each layer, the last one's too."""
        inputs = [z_SE]
        for weight, bias in self.layers[:-1]:
            out = inputs[-1] @ weight.T + bias
            inputs.append(out if len(inputs) == len(self.layers) - 1 else out.relu())
        return inputs

    def weights(self, z_SE: Tensor) -> Tensors:
        """Return the generated tensors of each device, (S, ...)."""
        weight, bias = self.layers[-1]
        W_SR = self.inputs(z_SE)[-1] @ weight.T + bias
        pieces = torch.split(W_SR, self.sizes, dim=1)
        return {name: piece.view(-1, *shape) for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)}

    def gradients(self, z_SE: Tensor, change_SR: Tensor, clip: float) -> tuple[list[list[Tensor]], Tensor, Tensor]:
        """Return the sum of clipped gradients by layer, the gradients of z (not clipped), and the norms before clipping."""
        inputs, deltas = self.inputs(z_SE), [-change_SR]
        for k in range(len(self.layers) - 1, 0, -1):
            slope = deltas[0] @ self.layers[k][0]
            deltas.insert(0, slope if k == len(self.layers) - 1 else slope * (inputs[k] > 0))
        square = torch.zeros(len(z_SE))
        for a, delta in zip(inputs, deltas, strict=True):
            square += delta.square().sum(1) * (a.square().sum(1) + 1)
        norm_S = square.sqrt()
        factor = (clip / norm_S.clamp_min(1e-12)).clamp_max(1.0)[:, None] if math.isfinite(clip) else torch.ones(len(z_SE), 1)
        sums = [[(delta * factor).T @ a, (delta * factor).sum(0)] for a, delta in zip(inputs, deltas, strict=True)]
        return sums, deltas[0] @ self.layers[0][0], norm_S

    def step_z(self, chosen: Tensor, dz_SE: Tensor, lr: float = 0.1) -> None:
        """Take one step of Adam of each device's own embedding."""
        self.z_steps[chosen] += 1
        first, second = self.z_first[chosen].lerp(dz_SE, 0.1), self.z_second[chosen] * 0.999 + 0.001 * dz_SE.square()
        self.z_first[chosen], self.z_second[chosen] = first, second
        t = self.z_steps[chosen][:, None]
        self.z_NE[chosen] -= lr * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)


@dataclass
class Server:
    """The released state, and steps on it by noisy sums that are divided by DRAWN."""

    options: Options
    shared: Tensors
    hyper: Hypernetwork | None
    draw: torch.Generator
    moments: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    step: int = 0

    @property
    def deviation(self) -> float:
        """Deviation of the noise on a sum, in units of the clip of its block."""
        return self.options.noise * math.sqrt(2 if self.hyper else 1)

    def noisy(self, total: Tensor, clip: float) -> Tensor:
        noise = torch.randn(total.shape, generator=self.draw) * (self.deviation * clip) if self.options.noise else 0.0
        return (total + noise) / DRAWN

    def take_shared(self, changes: Tensors) -> None:
        """Add the noisy mean of clipped changes (S, ...)."""
        norm_S = torch.stack([change.flatten(1).square().sum(1) for change in changes.values()]).sum(0).sqrt()
        clip = self.options.clip
        factor_S = (clip / norm_S.clamp_min(1e-12)).clamp_max(1.0) if self.options.noise else torch.ones(len(norm_S))
        for name, change in changes.items():
            self.shared[name] = self.shared[name] + self.noisy(torch.einsum("s,s...->...", factor_S, change), clip)

    def take_generated(self, chosen: Tensor, change_SR: Tensor) -> None:
        """Step the hypernetwork by the noisy mean of clipped gradients, and the cohort's embeddings without noise."""
        assert self.hyper is not None
        options, hyper = self.options, self.hyper
        clip = options.clip_phi if options.noise else math.inf
        sums, dz_SE, _ = hyper.gradients(hyper.z_NE[chosen], change_SR, clip)
        hyper.step_z(chosen, dz_SE / DRAWN)
        self.step += 1
        flat = [tensor for layer in hyper.layers for tensor in layer]
        self.moments = self.moments or [(torch.zeros_like(tensor), torch.zeros_like(tensor)) for tensor in flat]
        for tensor, total, (first, second) in zip(flat, [t for layer in sums for t in layer], self.moments, strict=True):
            gradient = self.noisy(total, clip)
            if options.phi_optimiser == "sgd":
                first.mul_(0.9).add_(gradient)
                tensor.sub_(first, alpha=options.phi_lr)
            else:
                first.lerp_(gradient, 0.1)
                second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                scale = (second / (1 - 0.999**self.step)).sqrt_().add_(1e-8)
                tensor.addcdiv_(first, scale, value=-options.phi_lr / (1 - 0.9**self.step))


class Simulation:
    """All devices of a run."""

    def __init__(self, options: Options, x: Tensor, y: Tensor) -> None:
        torch.manual_seed(options.seed)
        self.options, self.x, self.y = options, x, y
        spec = ModelSpec("vit", "images", (28, 28, 1), CLASSES, options=VIT)
        self.model = build(spec, options.seed)
        initial = {name: tensor.detach().clone() for name, tensor in tensors_of(self.model).items()}
        self.part_of: Mapping[str, PartKind] = (
            dict.fromkeys(initial, "private") if options.method == "local" else assign(get(options.method), self.model)
        )
        of = {
            kind: {n: t for n, t in initial.items() if self.part_of[n] == kind} for kind in ("shared", "generated", "private")
        }
        self.private = {name: tensor.expand(DEVICES, *tensor.shape).clone() for name, tensor in of["private"].items()}
        hyper = Hypernetwork(of["generated"], options) if of["generated"] else None
        self.server = Server(options, of["shared"], hyper, torch.Generator().manual_seed(options.seed + 1))
        self.draw = torch.Generator().manual_seed(options.seed + 2)
        self._gradient = vmap(grad(self._loss))

    def _loss(self, parameters: Tensors, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(self.model, parameters, (x,)), y)

    def served(self, chosen: Tensor) -> Tensors:
        """Return the models (S, ...) with which these devices begin."""
        own = {name: tensor[chosen] for name, tensor in self.private.items()}
        shared = {name: tensor.expand(len(chosen), *tensor.shape) for name, tensor in self.server.shared.items()}
        hyper = self.server.hyper
        return own | shared | (hyper.weights(hyper.z_NE[chosen]) if hyper else {})

    def trained(self, models: Tensors, chosen: Tensor, epochs: int) -> Tensors:
        """Return the models after local SGD, all devices at once."""
        batch = self.options.batch
        for _ in range(epochs):
            order = torch.rand(len(chosen), TRAIN, generator=self.draw).argsort(1)
            for start in range(0, TRAIN, batch):
                rows = order[:, start : start + batch]
                x = self.x[chosen[:, None], rows]
                gradient = self._gradient(models, x, self.y[chosen[:, None], rows])
                models = {name: models[name] - self.options.lr * gradient[name] for name in models}
        return models

    def round(self) -> None:
        """Draw a cohort, train it, and release the next state."""
        drawn = torch.rand(DEVICES, generator=self.draw) < DRAWN / DEVICES
        chosen = torch.arange(DEVICES) if self.options.method == "local" else drawn.nonzero().flatten()
        before = self.served(chosen)
        after = self.trained(before, chosen, self.options.epochs)
        for name in self.private:
            self.private[name][chosen] = after[name]
        if self.server.shared:
            self.server.take_shared({name: after[name] - before[name] for name in self.server.shared})
        hyper = self.server.hyper
        if hyper is not None:
            change_SR = torch.cat([(after[name] - before[name]).flatten(1) for name in hyper.names], dim=1)
            self.server.take_generated(chosen, change_SR)

    def accuracy(self, finish: int = 0) -> tuple[float, float]:
        """Return the mean accuracies on the validation and test images, after `finish` epochs of training without noise."""
        right: list[Tensor] = []
        for chosen in torch.arange(DEVICES).split(100):
            models = self.trained(self.served(chosen), chosen, finish)
            with torch.no_grad():
                scores = vmap(lambda p, x: functional_call(self.model, p, (x,)))(models, self.x[chosen, TRAIN:])
            right.append((scores.argmax(-1) == self.y[chosen, TRAIN:]).float())
        both = torch.cat(right)
        return float(both[:, :VALIDATION].mean()), float(both[:, VALIDATION:].mean())


def courses(simulation: Simulation, every: int) -> Iterator[dict[str, object]]:
    """Yield the accuracies at intervals and at the end, and the seconds so far."""
    started, rounds = time.monotonic(), simulation.options.rounds
    for number in range(1, rounds + 1):
        simulation.round()
        last = number == rounds
        if last or not number % every:
            validation, test = simulation.accuracy()
            finished = simulation.accuracy(5) if last else ("", "")
            yield {
                "round": number,
                "validation": validation,
                "test": test,
                "finished_validation": finished[0],
                "finished_test": finished[1],
                "seconds": round(time.monotonic() - started, 1),
            }


@click.command()
@click.argument("data", type=click.Path(exists=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--method", default="fedper")
@click.option("--epsilon", default=math.inf)
@click.option("--rounds", default=200)
@click.option("--every", default=50)
@click.option("--clip", default=1.0)
@click.option("--clip-phi", default=1.0)
@click.option("--phi-lr", default=1e-3)
@click.option("--phi-optimiser", type=click.Choice(["adam", "sgd"]), default="adam")
@click.option("--hidden", default=16)
@click.option("--lr", default=0.1)
@click.option("--epochs", default=2)
@click.option("--seed", default=0)
def main(data: Path, out: Path, epsilon: float, every: int, rounds: int, **settings: Any) -> None:
    """Run one method with one group of settings, and append rows to OUT."""
    noise = noise_for(epsilon, DELTA, DRAWN / DEVICES, rounds) if math.isfinite(epsilon) else 0.0
    options = Options(noise=noise, rounds=rounds, **settings)
    with np.load(data) as arrays:
        x, y = divided(arrays["train_x"], arrays["train_y"], options.seed)
    for row in courses(Simulation(options, x, y), every):
        line = {"epsilon": epsilon, **{key: getattr(options, key) for key in Options.__dataclass_fields__}, **row}
        exists = out.exists()
        with out.open("a", newline="") as file:
            writer = csv.DictWriter(file, line)
            if not exists:
                writer.writeheader()
            writer.writerow(line)
        click.echo(str(line))


if __name__ == "__main__":
    main()
