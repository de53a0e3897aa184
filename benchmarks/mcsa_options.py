"""Comparison of options of FedMCSA with sigma = 50: sigma by spread, a cap on the self-attention, attention over updates.

It runs in one process without a network: the aggregators of the product over a vault in memory, and FedMCSA's local training
(20 steps of 20 samples, lr 0.02, mu 5 or 0) of a small model on the digits. The scenarios are: 10 clients with two classes
each; 20 clients in 5 groups of equal classes with 45 training samples each; the same with 20 samples; 10 similar clients (all
classes, 20 samples). Accuracy is that of the trained models on each client's own test samples, the mean over clients: after the
last round, and the best over the rounds (BMTA, which is optimistic).
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AmpSettings, AttentionSettings, HeurAmpSettings, MeanSettings
from attune.fedserver.lab.aggregators.attention import Mcsa, attention, cosines
from attune.fedserver.lab.aggregators.base import Aggregator, Block, MemoryVault, Tensors
from attune.fedserver.lab.aggregators.mean import Mean
from attune.fedserver.lab.aggregators.mixing import GRAM
from attune.fedserver.lab.aggregators.similarity import Amp, HeurAmp
from attune.fedserver.lab.aggregators.votes import gram, stack

STEPS, BATCH, LR = 20, 20, 0.02
Weights = Callable[[torch.Tensor], torch.Tensor]  # cosines (S, S) -> attention (S, S)


@dataclass(frozen=True)
class Client:
    name: str
    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


class Variant(Mcsa):
    """FedMCSA with one of the options. `weights` makes A from a component's cosines."""

    def __init__(self, vault: MemoryVault, names: Sequence[str], weights: Weights, updates: bool) -> None:
        super().__init__(AttentionSettings(), vault, 0, layers(names))
        self.of_cosines, self.over_updates = weights, updates

    def partial(self, block: Block, updates: Sequence[PartUpdate]) -> Tensors:
        """Return the inner products of x_i or, with attention over updates, of x_i - w_i, where w_i is the served value."""
        if not self.over_updates:
            return super().partial(block, updates)
        return {GRAM: gram(stack([self._change(block, each) for each in updates], block.names))}

    def _change(self, block: Block, update: PartUpdate) -> PartUpdate:
        served = self._vault.read(self.slot(update.client))
        return PartUpdate(update.client, update.weight, {name: update.tensors[name] - served[name] for name in block.names})

    def _weights(self, G_SS: torch.Tensor, updates: Sequence[PartUpdate]) -> torch.Tensor:
        return self.of_cosines(cosines(G_SS))


def layers(names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split(".")[0], []).append(name)
    return found


def by_spread(factor: float) -> Weights:
    """Return weights with sigma = factor / standard deviation of all S^2 cosines."""

    def weights(cosine_SS: torch.Tensor) -> torch.Tensor:
        spread = float(cosine_SS.std(correction=0))
        return attention(cosine_SS, min(factor / spread, 1e9) if spread > 0 else 0.0)

    return weights


def softened(factor: float, sigma: float = 50.0) -> Weights:
    """Return weights with sigma, or factor / the cosines' standard deviation if that is smaller."""

    def weights(cosine_SS: torch.Tensor) -> torch.Tensor:
        spread = float(cosine_SS.std(correction=0))
        return attention(cosine_SS, min(sigma, factor / spread) if spread > 0 else sigma)

    return weights


def by_gap(factor: float) -> Weights:
    """Return weights with sigma = factor / mean of 1 - cos over the pairs."""

    def weights(cosine_SS: torch.Tensor) -> torch.Tensor:
        S = len(cosine_SS)
        gap = float((1 - cosine_SS).sum()) / max(S * (S - 1), 1)
        return attention(cosine_SS, min(factor / gap, 1e9) if gap > 0 else 0.0)

    return weights


def by_nearest(factor: float) -> Weights:
    """Return weights with sigma = factor / median over clients of 1 - the cosine with the most similar other client."""

    def weights(cosine_SS: torch.Tensor) -> torch.Tensor:
        if len(cosine_SS) == 1:
            return torch.ones_like(cosine_SS)
        nearest_S = cosine_SS.clone().fill_diagonal_(-1).max(dim=1).values
        gap = float((1 - nearest_S).median())
        return attention(cosine_SS, min(factor / gap, 1e9) if gap > 0 else 0.0)

    return weights


def capped(sigma: float, cap: float) -> Weights:
    """Return weights in which no client weighs more than `cap` on itself; the rest of its row grows in proportion."""

    def weights(cosine_SS: torch.Tensor) -> torch.Tensor:
        A_SS = attention(cosine_SS, sigma)
        own_S = A_SS.diagonal().clone()
        others_SS = A_SS.clone().fill_diagonal_(0)
        # 1 - own_S can be 0 where the others' weights are not: they are below the rounding of 1.
        grown_SS = others_SS / others_SS.sum(dim=1, keepdim=True).clamp(min=1e-300) * (1 - cap)
        return torch.where((own_S > cap)[:, None], grown_SS + cap * torch.eye(len(A_SS), dtype=A_SS.dtype), A_SS)

    return weights


def fixed(sigma: float) -> Weights:
    return lambda cosine_SS: attention(cosine_SS, sigma)


ATTENTION: dict[str, tuple[Weights, bool]] = {
    "sigma=10": (fixed(10), False),
    "sigma=50": (fixed(50), False),
    "sigma=200": (fixed(200), False),
    "sigma=1000": (fixed(1000), False),
    "spread 1": (by_spread(1), False),
    "spread 2": (by_spread(2), False),
    "spread 4": (by_spread(4), False),
    "50 or spread 2": (softened(2), False),
    "50 or spread 3": (softened(3), False),
    "50 or spread 4": (softened(4), False),
    "50 or spread 6": (softened(6), False),
    "gap 2": (by_gap(2), False),
    "gap 4": (by_gap(4), False),
    "gap 8": (by_gap(8), False),
    "nearest 1": (by_nearest(1), False),
    "nearest 2": (by_nearest(2), False),
    "nearest 4": (by_nearest(4), False),
    "sigma=50, cap 0.5": (capped(50, 0.5), False),
    "sigma=50, cap 0.8": (capped(50, 0.8), False),
    "sigma=200, cap 0.8": (capped(200, 0.8), False),
    "updates, sigma=5": (fixed(5), True),
    "updates, sigma=10": (fixed(10), True),
    "updates, spread 2": (by_spread(2), True),
    "updates, gap 4": (by_gap(4), True),
}


OPTIONS = ["local", "mean", *ATTENTION, "heuramp 0.25", "heuramp 0.5", "amp auto", "amp 0.1", "amp 1"]


def aggregator_of(option: str, vault: MemoryVault, names: Sequence[str]) -> Aggregator | None:
    if option == "local":
        return None
    if option == "mean":
        return Mean(MeanSettings(uniform=True), vault, 0, layers(names))
    if option.startswith("heuramp"):
        return HeurAmp(HeurAmpSettings(self_weight=float(option.split()[1])), vault, 0, layers(names))
    if option.startswith("amp"):
        word = option.split()[1]
        return Amp(AmpSettings(sigma="auto" if word == "auto" else float(word)), vault, 0, layers(names))
    return Variant(vault, names, *ATTENTION[option])


# name: (clients, groups with the same two classes, training samples of each); 0 groups: neighbours share a class
SCENARIOS = {"two classes": (10, 0, 0), "groups": (20, 5, 45), "groups, 20 samples": (20, 5, 20), "alike": (10, 1, 20)}


def scenario(name: str, seed: int) -> list[Client]:
    """Cut the digits for a scenario. Training and test samples are never the same."""
    count, groups, samples = SCENARIOS[name]
    bunch = load_digits()
    x, y = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=draw)
    x, y = x[order], y[order]
    owned = [torch.arange(len(x))[y == c] for c in range(10)]
    clients = []
    for i in range(count):
        if groups:
            classes = range(10) if groups == 1 else ((i % groups) * 2, (i % groups) * 2 + 1)
            pool = torch.cat([owned[c] for c in classes])
            pool = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed + i % groups))]
            mine = pool[i // groups :: count // groups]
            train, test = mine[:samples], mine[samples:]
        else:  # client i has half of class i and half of class i + 1
            j = (i + 1) % 10
            mine = torch.cat([owned[i][: len(owned[i]) // 2], owned[j][len(owned[j]) // 2 :]])
            mine = mine[torch.randperm(len(mine), generator=draw)]
            train, test = mine[: len(mine) * 3 // 4], mine[len(mine) * 3 // 4 :]
        clients.append(Client(f"c{i:02}", x[train], y[train], x[test], y[test]))
    return clients


def initial(model: str, seed: int) -> Tensors:
    torch.manual_seed(seed)
    sizes = [64, 10] if model == "mlr" else [64, 100, 10]
    result: Tensors = {}
    for k, (inputs, outputs) in enumerate(pairwise(sizes)):
        layer = torch.nn.Linear(inputs, outputs)
        result |= {f"l{k}.weight": layer.weight.detach().clone(), f"l{k}.bias": layer.bias.detach().clone()}
    return result


def logits(theta: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compute the logits of one client, or of N stacked clients."""
    x = x @ theta["l0.weight"].mT + theta["l0.bias"].unsqueeze(-2)
    if "l1.bias" in theta:
        x = x.relu() @ theta["l1.weight"].mT + theta["l1.bias"].unsqueeze(-2)
    return x


def train(clients: Sequence[Client], served: Mapping[str, Tensors], mu: float, seed: int) -> dict[str, Tensors]:
    """Train all clients at once, each on whole batches of its own permutations."""
    centre = {name: torch.stack([served[c.name][name] for c in clients]) for name in served[clients[0].name]}
    theta = {name: tensor.clone().requires_grad_() for name, tensor in centre.items()}
    order = [indices(len(client.x), seed + i) for i, client in enumerate(clients)]
    for step in range(STEPS):
        x = torch.stack([client.x[mine[step]] for client, mine in zip(clients, order, strict=True)])
        y = torch.stack([client.y[mine[step]] for client, mine in zip(clients, order, strict=True)])
        loss = len(clients) * cross_entropy(logits(theta, x).flatten(end_dim=1), y.flatten())
        gradients = torch.autograd.grad(loss, list(theta.values()))
        with torch.no_grad():
            for (name, tensor), gradient in zip(theta.items(), gradients, strict=True):
                tensor.sub_(gradient + mu * (tensor - centre[name]), alpha=LR)
    return {client.name: {name: tensor[i].detach() for name, tensor in theta.items()} for i, client in enumerate(clients)}


def indices(samples: int, seed: int) -> torch.Tensor:
    """Return indices of samples, (STEPS, BATCH), from seeded permutations without their incomplete last batches."""
    draw = torch.Generator().manual_seed(seed)
    whole = samples // BATCH
    epochs = [torch.randperm(samples, generator=draw)[: whole * BATCH] for _ in range(-(-STEPS // whole))]
    return torch.cat(epochs).view(-1, BATCH)[:STEPS]


def play(option: str, setting: str, model: str, mu: float, rounds: int, seed: int) -> tuple[float, float]:
    """Run a federation. Return the mean accuracy over clients after the last round, and the best over the rounds."""
    clients, start = scenario(setting, seed), initial(model, seed)
    vault = MemoryVault()
    aggregator = aggregator_of(option, vault, list(start))
    if aggregator:
        aggregator.start(start)
    own = {client.name: start for client in clients}
    history = []
    for number in range(rounds):
        if aggregator:
            own = {client.name: dict(vault.read(str(aggregator.slot(client.name)))) for client in clients}
        own = train(clients, own, mu if aggregator else 0.0, 10_000 * number)
        scores = [float((logits(own[c.name], c.test_x).argmax(1) == c.test_y).float().mean()) for c in clients]
        history.append(sum(scores) / len(scores))
        if aggregator:
            aggregator.close_round([PartUpdate(c.name, len(c.x), own[c.name]) for c in clients])
    return history[-1], max(history)


@click.command()
@click.option("--rounds", default=40)
@click.option("--seeds", default=3)
@click.option("--mu", default="5,0")
@click.option("--scenario", "chosen", multiple=True, type=click.Choice(list(SCENARIOS)), default=list(SCENARIOS))
@click.option("--option", "options", multiple=True, default=OPTIONS)
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).parent / "results" / "mcsa_options.csv")
def main(rounds: int, seeds: int, mu: str, chosen: tuple[str, ...], options: tuple[str, ...], out: Path) -> None:
    """Write one line for each scenario, model, mu and option, with means over the seeds."""
    torch.set_num_threads(1)
    with out.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["scenario", "model", "mu", "option", "rounds", "seeds", "last", "worst_seed", "best_round"])
        for setting in chosen:
            for model in ("mlr", "dnn"):
                for pull in map(float, mu.split(",")):
                    for option in options:
                        began = time.monotonic()
                        results = [play(option, setting, model, pull, rounds, seed) for seed in range(seeds)]
                        last, best = zip(*results, strict=True)
                        row = [f"{value:.4f}" for value in (sum(last) / seeds, min(last), sum(best) / seeds)]
                        table.writerow([setting, model, f"{pull:g}", option, rounds, seeds, *row])
                        stream.flush()
                        took = f"({time.monotonic() - began:.0f} s)"
                        click.echo(f"{setting} {model} mu={pull:g} {option}: {' '.join(row)} {took}")


if __name__ == "__main__":
    main()
