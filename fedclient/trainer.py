"""Local training and evaluation of one model on one device: tensors in, tensors and numbers out; no network, no files.

Shapes: N samples, C classes; a batch has B samples. Samples may lie on the trainer's device or be moved batch by batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from common.config import TrainSettings
from common.errors import AttuneError
from common.objectives.base import Objective
from common.predictors.base import Predictor

EVALUATION_BATCH = 512

Tensors = dict[str, Tensor]
Progress = Callable[[float], None]


class TrainingDiverged(AttuneError):
    """The loss is no longer a finite number."""

    kind, exit_code = "training-diverged", 26


class Cancelled(AttuneError):
    """Another order, or the end, has replaced this work."""

    kind = "cancelled"


@dataclass(frozen=True)
class Seeds:
    """What is random in one order's training."""

    batches: int
    dropout: int


@dataclass(frozen=True)
class Trained:
    tensors: Tensors
    loss: float  # sample-weighted mean over the last epoch, or over all local steps


def batches(samples: int, settings: TrainSettings, seed: int) -> Iterator[Tensor]:
    """Indices (B,) of each step: epochs over seeded permutations, or `local_steps` batches, reshuffled when exhausted.

    The last, incomplete batch of a permutation is used.
    """
    generator = torch.Generator().manual_seed(seed)
    left = settings.local_steps or settings.local_epochs * -(-samples // settings.batch_size)
    while left > 0:
        for index_B in torch.split(torch.randperm(samples, generator=generator), settings.batch_size)[:left]:
            left -= 1
            yield index_B


class Trainer:
    """Trains and evaluates weights given by name; the module only says how to compute.

    Arguments: `model` is moved to `device`; `settings` as the plan fixes them.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, predictor: Predictor, settings: TrainSettings, device: torch.device
    ) -> None:
        self.model = model.to(device)
        self.objective = objective
        self.predictor = predictor
        self.settings = settings
        self.device = device
        self.trainable = {name for name, p in model.named_parameters() if p.requires_grad}

    def train(
        self,
        start: Mapping[str, Tensor],
        received: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        seeds: Seeds,
        progress: Progress = lambda done: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Trained:
        """SGD with a fresh optimiser from `start` on x (N, ...), y (N,).

        `received`: what the server served, by name, for objectives that pull towards it.
        Errors: TrainingDiverged if the loss is not finite; Cancelled if `cancelled()` turns true between two batches.
        """
        params, buffers = self._leaves(start)
        anchor = {name: tensor.to(self.device) for name, tensor in received.items() if name in params}
        settings, samples = self.settings, len(x)
        optimiser = torch.optim.SGD(
            list(params.values()), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
        per_epoch = -(-samples // settings.batch_size)
        steps = settings.local_steps or settings.local_epochs * per_epoch
        counted_from = 0 if settings.local_steps else steps - per_epoch
        total, seen = torch.zeros((), device=self.device, dtype=torch.float64 if self.device.type != "mps" else None), 0
        forward = self._forward(buffers)
        self.model.train()
        with self._fork_rng(seeds.dropout):
            for step, index_B in enumerate(batches(samples, settings, seeds.batches)):
                if step == counted_from:
                    total, seen = torch.zeros_like(total), 0
                if cancelled():
                    raise Cancelled("this work was replaced")
                x_B, y_B = self._batch(x, index_B), self._batch(y, index_B)
                optimiser.zero_grad(set_to_none=True)
                with self._autocast():
                    loss = self.objective.loss(forward, params, x_B, y_B, anchor)
                torch.autograd.backward(loss)
                if settings.clip_norm:
                    nn.utils.clip_grad_norm_(params.values(), settings.clip_norm)
                optimiser.step()
                total += loss.detach() * len(index_B)
                seen += len(index_B)
                if (step + 1) % per_epoch == 0 or step + 1 == steps:
                    self._check(total)
                progress((step + 1) / steps)
        tensors = {name: tensor.detach().cpu() for name, tensor in (params | buffers).items()}
        for name in params:
            self._check(tensors[name])
        return Trained({name: tensors[name] for name in start}, float(total) / seen)

    def evaluate(self, tensors: Mapping[str, Tensor], x: Tensor, y: Tensor) -> float:
        """Accuracy, a fraction, of `tensors` on x (N, ...), y (N,)."""
        correct = 0
        for at, logits_BC in self.logits(tensors, x):
            correct += int((logits_BC.argmax(-1) == y[at : at + len(logits_BC)].to(self.device)).sum())
        return correct / y.numel()

    def logits(self, tensors: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(position, logits (B, C)) for each batch of x (N, ...), without gradients."""
        on_device = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        params = {name: tensor for name, tensor in on_device.items() if name in self.trainable}
        forward = self._forward({name: tensor for name, tensor in on_device.items() if name not in self.trainable})
        self.model.eval()
        for at in range(0, len(x), EVALUATION_BATCH):
            with torch.no_grad(), self._autocast():
                yield at, self.predictor.logits(forward, params, x[at : at + EVALUATION_BATCH].to(self.device))

    def _batch(self, tensor: Tensor, index_B: Tensor) -> Tensor:
        return tensor[index_B.to(tensor.device)].to(self.device)

    def _leaves(self, start: Mapping[str, Tensor]) -> tuple[Tensors, Tensors]:
        """`start` copied to the device: what is trained, as leaves that take gradients, and the rest."""
        copies = {name: tensor.detach().to(self.device, copy=True) for name, tensor in start.items()}
        params = {name: tensor.requires_grad_() for name, tensor in copies.items() if name in self.trainable}
        return params, {name: tensor for name, tensor in copies.items() if name not in params}

    def _forward(self, buffers: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor], Tensor], Tensor]:
        def forward(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
            return cast(Tensor, functional_call(self.model, {**buffers, **params}, (x,)))

        return forward

    def _autocast(self) -> Any:
        if self.settings.mixed_precision == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    @contextmanager
    def _fork_rng(self, seed: int) -> Iterator[None]:
        """Inside, dropout draws from `seed`; nobody else's random numbers change."""
        cuda = [self.device.index or 0] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(seed)
            yield

    def _check(self, values: Tensor) -> None:
        if not torch.isfinite(values).all():
            settings = self.settings
            raise TrainingDiverged(
                f"the loss or the weights are not finite any more (lr {settings.lr:g}, momentum {settings.momentum:g}): "
                "lower train.lr or set train.clip_norm on the server"
            )
