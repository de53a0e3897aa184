"""The loop of mini-batches that every local algorithm runs: SGD on any loss and any of the tensors.

Objectives of plain descent are here too: all of the model at once, one step ahead (MAML), one part after the other, or one part
alone.

Fallah, Mokhtari, Ozdaglar, 'Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach', NeurIPS 2020 (Per-FedAvg, the variant FO).
Collins, Hassani, Mokhtari, Shakkottai, 'Exploiting Shared Representations for Personalized Federated Learning', ICML 2021
(FedRep).

B samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from attune.common.config import TrainSettings
from attune.common.errors import AttuneError
from attune.common.methods.settings.objectives import AlternatingSettings, FrozenPrivateSettings, MamlSettings, SgdSettings
from attune.common.torch_state import seeded
from attune.common.wire.tensors import is_finite
from attune.fedclient.work.executor import Cancelled, Jobs
from attune.fedclient.work.objectives.augment import RANK, augmented
from attune.fedclient.work.objectives.base import Batch, LocalTask, Loss, Objective, Tensors, Trained
from attune.fedclient.work.private.noisy_steps import NoisyGradients, OrderNoise

# (tensors, beside) -> scalar
Penalty = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
# (tensors, beside): changes `beside` in place, element by element, so that it serves one device and many.
Follow = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


_BY_NAME = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


class TrainingDiverged(AttuneError):
    """The loss or the weights are not finite. The device goes on with the next order.

    What to do: Lower `train.lr`, or set `train.clip_norm`.
    """

    kind, exit_code = "training-diverged", 26


@dataclass(frozen=True)
class Ahead:
    """First-order MAML: the gradient after a step of plain SGD is applied to the tensors before that step."""

    rate: float
    purpose: str  # of the batches that the step is made with


@dataclass(frozen=True)
class Descent:
    """SGD with a fresh optimiser on `loss` from `tensors`, which stay as they are.

    If no tensor may move, it is a no-op with the loss NaN.
    """

    task: LocalTask
    settings: TrainSettings
    tensors: Mapping[str, Tensor]
    loss: Loss
    beside: Mapping[str, Tensor] = field(default_factory=dict)  # what else the loss needs of this device
    names: Collection[str] | None = None  # what is trained; all that may move if None
    undecayed: frozenset[str] = frozenset()  # tensors that are no weights of a model: train.weight_decay leaves them
    purpose: str = ""  # name of a task's second descent, which draws its own batches and dropout
    share: tuple[float, float] = (0.0, 1.0)  # where the task's progress begins and ends
    is_own: bool = False  # the tensors are the device's own under the model's names
    repeat: int = 1  # steps on each batch
    ahead: Ahead | None = None
    follow: Follow | None = None  # after each batch
    penalty: Penalty | None = None  # the method's term, for a loss of the user's own
    by_itself: str = ""  # why it cannot be computed together with those of other devices; empty: it can
    stays: bool = False  # the result stays on the device, and influences nothing that leaves it: it needs no noise

    def __repr__(self) -> str:
        return f"<Descent {self.purpose or 'of'} {len(self.moving)} tensors on {len(self.task.x)} samples>"

    @cached_property
    def moving(self) -> tuple[str, ...]:
        """The names of the tensors that take gradients."""
        movable = self.task.movable(self.tensors, self.is_own)
        return tuple(movable if self.names is None else [name for name in movable if name in self.names])

    def decay(self, name: str) -> float:
        """Return the weight decay of a tensor."""
        return 0.0 if name in self.undecayed else self.settings.weight_decay

    @property
    def per_epoch(self) -> int:
        """Steps in one pass over the samples."""
        return len(batch_sizes(len(self.task.x), self.settings.batch_size, self.task.network.normalises_batches))

    @property
    def steps(self) -> int:
        return self.settings.local_steps or self.settings.local_epochs * self.per_epoch

    @property
    def counted_from(self) -> int:
        """The first step whose loss is reported: of the last epoch, or of all steps."""
        return 0 if self.settings.local_steps else self.steps - self.per_epoch

    @property
    def noise(self) -> OrderNoise | None:
        """The noise of the steps, if they need one."""
        return None if self.stays else self.task.noise

    def batches(self, purpose: str) -> Iterator[Tensor]:
        """Yield the indices (B,) of each step; B may be 0 with noise. `purpose` names a separate draw."""
        if self.noise is not None:
            return self.noise.batches(len(self.task.x), self.settings.batch_size, self.steps, purpose)
        normalises = self.task.network.normalises_batches
        return batches(len(self.task.x), self.settings, self.batch_seed(purpose), normalises)

    def batch_seed(self, purpose: str) -> int:
        """Return the seed of the draw of batches for this purpose."""
        return self.task.seeds(f"batches {purpose}".strip())

    def progress(self, done: float) -> None:
        """Report the share of this descent that is done, 0 to 1, as the task's progress."""
        self.task.progress(self.share[0] + (self.share[1] - self.share[0]) * done)

    def alone(self) -> Trained:
        """Run the descent on one device by itself.

        Raises:
            TrainingDiverged: The loss or a tensor is not finite.
            Cancelled: The work was replaced, between two batches.
        """
        return descend(self)


def descend(job: Descent) -> Trained:
    """Run the descent of one device by itself. Errors are those of `Descent.alone`."""
    task, settings = job.task, job.settings
    work, beside = _leaves(job), dict(job.beside)
    if not job.moving:
        return Trained(work, math.nan, beside)
    if job.follow is not None:
        beside = {name: tensor.detach().clone() for name, tensor in beside.items()}
    trained = {name: work[name] for name in job.moving}
    optimiser = optimiser_for(trained, settings, job.decay)
    schedule = schedule_for(optimiser, settings, job.steps)
    others = job.batches(job.ahead.purpose) if job.ahead else None

    noisy = NoisyGradients(job) if job.noise is not None else None

    def value(batch: Batch) -> Tensor:
        if job.ahead is None or others is None:
            return job.loss(work, beside, batch)
        gradients = _gradients(job, job.loss(work, beside, batch_of(task, next(others))), trained)
        # The step is a constant here, so the gradient at its end is the first-order one.
        ahead = {name: tensor - job.ahead.rate * gradients[name] for name, tensor in trained.items()}
        return job.loss({**work, **ahead}, beside, batch)

    def step(batch: Batch, index_B: Tensor) -> Tensor:
        for _ in range(job.repeat):
            if noisy is not None:
                loss = noisy.set_on(work, beside, batch, index_B)
                optimiser.step()
            else:
                loss = _take_step(task, optimiser, lambda: value(batch), settings)
        if schedule is not None:
            schedule.step()
        if job.follow is not None:
            with torch.no_grad():
                job.follow(work, beside)
        return loss

    mean = _sweep(job, step)
    for tensor in trained.values():
        _check(tensor.detach(), settings)
    return Trained({name: tensor.detach() for name, tensor in work.items()}, mean, beside)


def last_loss(*stages: Trained) -> float:
    """Return the loss of the last stage in which a tensor moved."""
    return next((stage.loss for stage in reversed(stages) if not math.isnan(stage.loss)), math.nan)


def _sweep(job: Descent, step: Callable[[Batch, Tensor], Tensor]) -> float:
    """Call `step` with each mini-batch and its indices; return the sample-weighted mean of its losses over the reported steps.

    Raises:
        TrainingDiverged: The loss is not finite.
        Cancelled: The work was replaced, between two batches.
    """
    task, settings = job.task, job.settings
    total = torch.zeros((), device=task.device, dtype=torch.float64 if task.device.type != "mps" else None)
    seen = 0
    task.network.train(still=lambda name: not task.takes(name, job.is_own))
    with seeded(task.device, task.seeds(f"dropout {job.purpose}".strip())):
        for number, index_B in enumerate(job.batches(job.purpose)):
            if number == job.counted_from:
                total, seen = torch.zeros_like(total), 0
            if task.cancelled():
                raise Cancelled("this work was replaced")
            total += step(batch_of(task, index_B), index_B) * len(index_B)
            seen += len(index_B)
            if job.noise is None and ((number + 1) % job.per_epoch == 0 or number + 1 == job.steps):
                _check(total, settings)  # with noise, what fails must not follow from the loss of a sample
            job.progress((number + 1) / job.steps)
    return float(total) / max(1, seen)


def _leaves(job: Descent) -> Tensors:
    """Return copies to compute with; those that move take gradients."""
    copies = {name: tensor.detach().clone() for name, tensor in job.tensors.items()}
    for name in job.moving:
        copies[name].requires_grad_()
    return copies


def _take_step(
    task: LocalTask, optimiser: torch.optim.Optimizer, loss: Callable[[], Tensor], settings: TrainSettings
) -> Tensor:
    """Take one step on `loss()`, and return its detached value."""
    optimiser.zero_grad(set_to_none=True)
    with autocast(task.device, settings):
        value = loss()
    torch.autograd.backward(value)
    if settings.clip_norm:
        nn.utils.clip_grad_norm_([tensor for group in optimiser.param_groups for tensor in group["params"]], settings.clip_norm)
    optimiser.step()
    return value.detach()


def _gradients(job: Descent, loss: Tensor, trained: Mapping[str, Tensor]) -> Tensors:
    """Return gradients with clipping and weight decay, as one step of SGD has them.

    They are those of the step before prediction: a model that is trained for another step gets worse with every round.
    """
    clip = job.settings.clip_norm
    gradients = list(torch.autograd.grad(loss, list(trained.values()), materialize_grads=True))
    if clip:
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
        gradients = [gradient * torch.clamp(clip / (norm + 1e-6), max=1.0) for gradient in gradients]
    return {
        name: gradient + job.decay(name) * value.detach()
        for gradient, (name, value) in zip(gradients, trained.items(), strict=True)
    }


def autocast(device: torch.device, settings: TrainSettings) -> Any:
    """Return the context that sets the precision of a forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if settings.mixed_precision == "bf16" else nullcontext()


def _check(values: Tensor, settings: TrainSettings) -> None:
    if not is_finite(values):
        raise diverged(settings)


def diverged(settings: TrainSettings) -> TrainingDiverged:
    """Return the error for a diverged training."""
    return TrainingDiverged(
        f"the loss or the weights are not finite any more (lr {settings.lr:g}, momentum {settings.momentum:g}): "
        "lower train.lr or set train.clip_norm on the server"
    )


def optimiser_for(
    tensors: Mapping[str, Tensor], settings: TrainSettings, decay: Callable[[str], float]
) -> torch.optim.Optimizer:
    """Return a fresh optimiser, where `decay` has the weight decay of each tensor. Only SGD has momentum."""
    rates: dict[float, list[Tensor]] = {}
    for name, tensor in tensors.items():
        rates.setdefault(decay(name), []).append(tensor)
    groups = [{"params": some, "weight_decay": rate} for rate, some in rates.items()]
    if settings.optimizer in (UNSET, "sgd"):
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    made: torch.optim.Optimizer = _BY_NAME[str(settings.optimizer)](groups, lr=settings.lr)
    return made


def schedule_for(optimiser: torch.optim.Optimizer, settings: TrainSettings, steps: int) -> LambdaLR | None:
    """Return a schedule to step after each batch of `steps`; None if the rate is constant."""
    if settings.schedule in (UNSET, "constant"):
        return None
    if settings.schedule == "linear":
        return LambdaLR(optimiser, lambda step: max(0.0, 1 - step / steps))
    return LambdaLR(optimiser, lambda step: (1 + math.cos(math.pi * min(1.0, step / steps))) / 2)


def batch_sizes(samples: int, batch_size: int, joined: bool) -> list[int]:
    """Return the size of each batch of one pass.

    Args:
        samples: Number of samples.
        batch_size: Size of all batches but the last one.
        joined: A last batch of one sample joins the batch before it.
    """
    full, rest = divmod(samples, batch_size)
    if joined and full and rest == 1:
        return [batch_size] * (full - 1) + [batch_size + 1]
    return [batch_size] * full + [rest] * bool(rest)


def batches(samples: int, settings: TrainSettings, seed: int, joined: bool = False) -> Iterator[Tensor]:
    """Yield the indices (B,) of each step: epochs over seeded permutations, or `local_steps` batches, reshuffled at the end.

    The last, incomplete batch of a permutation is used. `joined` is as in `batch_sizes`.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = batch_sizes(samples, settings.batch_size, joined)
    left = settings.local_steps or settings.local_epochs * len(sizes)
    while left > 0:
        for index_B in torch.split(torch.randperm(samples, generator=generator), sizes)[:left]:
            left -= 1
            yield index_B


def batch_of(task: LocalTask, index_B: Tensor) -> Batch:
    """Return the samples and labels at these indices, on the task's processor, with the augmentation of the settings."""
    index_B = index_B.to(task.x.device)
    x, y = task.x[index_B].to(task.device), task.y[index_B].to(task.device)
    return Batch(augmented(x, task.settings.augment) if task.settings.augment and x.ndim == RANK else x, y)


class Sgd(Objective[SgdSettings]):
    """f_i(theta): mean cross-entropy of the mini-batch."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        trained: Trained = yield Descent(task, task.settings, task.start, task.plain)
        return trained


class Maml(Objective[MamlSettings]):
    """theta <- theta - beta * grad f(theta - alpha * grad f(theta; one batch); another batch)."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train with as many pairs of batches as SGD would take batches. The reported loss is that after the inner step."""
        alpha, beta = (rate or task.settings.lr for rate in (self._settings.alpha, self._settings.beta))
        outer = msgspec.structs.replace(task.settings, lr=beta)
        trained: Trained = yield Descent(task, outer, task.start, task.plain, ahead=Ahead(alpha, "inner"))
        return trained


class FrozenPrivate(Objective[FrozenPrivateSettings]):
    """SGD on all but the private part, which keeps its first value.

    Oh, Kim, Yun, 'FedBABU: Toward Enhanced Representation for Federated Image Classification', ICLR 2022.
    """

    def work(self, task: LocalTask) -> Jobs[Trained]:
        rest = {name for name in task.start if task.kinds.get(name) != "private"}
        trained: Trained = yield Descent(task, task.settings, task.start, task.plain, names=rest)
        return trained


class Alternating(Objective[AlternatingSettings]):
    """SGD on the private part with the rest frozen, then on the rest with the private part frozen."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train the private part, then the rest.

        The reported loss is that of the rest's last epoch; running statistics go on.
        """
        head_epochs, body_epochs = self._settings.head_epochs, self._settings.body_epochs
        private = {name for name in task.start if task.kinds.get(name) == "private"}
        turn = head_epochs / (head_epochs + body_epochs)
        head = msgspec.structs.replace(task.settings, local_epochs=head_epochs, local_steps=0)
        body = msgspec.structs.replace(head, local_epochs=body_epochs)
        first: Trained = yield Descent(task, head, task.start, task.plain, names=private, purpose="head", share=(0.0, turn))
        rest = task.start.keys() - private
        second: Trained = yield Descent(task, body, first.tensors, task.plain, names=rest, share=(turn, 1.0))
        return Trained(second.tensors, last_loss(first, second))
