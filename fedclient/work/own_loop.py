"""A user's own loop in place of a descent, and a user's own scores: what these functions are given, and what becomes of it.

B samples of a batch, N samples, C classes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from attune.common.config import TrainSettings
from attune.common.errors import AttuneError, SettingError
from attune.common.methods.method import ConfiguredMethod
from attune.common.models.body import names_of, training_mode
from attune.common.torch_state import seeded
from attune.common.wire.tensors import DTYPES
from attune.fedclient.options import Evaluate, Train
from attune.fedclient.work.executor import Cancelled, Jobs
from attune.fedclient.work.objectives.base import Batch, Tensors, Trained, split
from attune.fedclient.work.objectives.descent import Descent, TrainingDiverged

T = TypeVar("T")
STATE_BYTES = 64 << 20  # that a loop may keep, whatever its model is
STATE_MODELS = 8  # so many times the bytes of its model
STATE_NAMES = 10_000
LONGEST_NAME = 200  # characters
UNMOVED = (
    "your train() changed no weight of its model, so the round goes on with the model as it was served. Train the model that "
    "train() is given, in place: not a copy of it, with an optimizer of context.parameters(), and without old weights put back"
)


@dataclass(frozen=True)
class Data:
    """Samples and labels for a user's loop.

    x is (N, ...): images (N, C, H, W), series (N, T, C), tabular (N, F), prepared as a model takes them; tokens (N, T). y is
    (N,) or (N, T): indices into `classes`; in other tasks (N, K).
    """

    x: Tensor
    y: Tensor
    classes: Sequence[int | str] = ()
    batch_size: int = 32
    seed: int = 0
    joined: bool = False  # a last batch of one sample joins the batch before it, as batch normalisation needs

    def __len__(self) -> int:
        return len(self.x)

    @property
    def dataset(self) -> TensorDataset:
        """Pairs (x, y), for a Dataset or DataLoader of one's own around it."""
        return TensorDataset(self.x, self.y)

    def batches(self, batch_size: int | None = None, shuffle: bool = True) -> DataLoader[Any]:
        """Return a loader of pairs (x, y), by default with train.batch_size, in another order in each epoch."""
        generator, size = torch.Generator().manual_seed(self.seed), batch_size or self.batch_size
        if self.joined and len(self) > size > 1 and len(self) % size == 1:
            order = RandomSampler(self.dataset, generator=generator) if shuffle else SequentialSampler(self.dataset)
            return DataLoader(self.dataset, batch_sampler=_Joined(order, size, drop_last=True), generator=generator)
        return DataLoader(self.dataset, size, shuffle, generator=generator)


class _Joined(BatchSampler):
    """Batches of which the last one takes the one sample that would be left."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.sampler)
        last = len(order) - self.batch_size - 1
        yield from (order[at : at + self.batch_size] for at in range(0, last, self.batch_size))
        yield order[last:]


class Context:
    """Context of a user's loop: the plan's settings, what the method adds, and the report of progress."""

    def __init__(self, job: Descent, model: nn.Module, extras: Mapping[str, nn.Parameter]) -> None:
        self._job, self._extras = job, extras
        self._names = dict(_live(model))
        self.model = model

    def __repr__(self) -> str:
        return f"<Context of round {self.round}, {self.stage or 'one stage'}>"

    @property
    def round(self) -> int:
        return self._job.task.round

    @property
    def name(self) -> str:
        """This device's name."""
        return self._job.task.name

    @property
    def state(self) -> dict[str, Any]:
        """Tensors, arrays and numbers that this device keeps from order to order; they never leave it.

        They are committed with the result of the order: an order that fails or is repeated begins with the state of the order
        before it. They come back as tensors.
        """
        return self._job.task.state

    @property
    def stage(self) -> str:
        """Which of its trainings a method with several asks for ("head", "own", "tune"); empty: the only or first one."""
        return self._job.purpose

    @property
    def settings(self) -> TrainSettings:
        """lr, momentum, batch_size, local_epochs, local_steps, ... of this stage. A loop may heed them or not."""
        return self._job.settings

    @property
    def device(self) -> torch.device:
        return self._job.task.device

    @property
    def received(self) -> Tensors:
        """Tensors that the server last served, by name."""
        return self._job.task.received

    @property
    def frozen(self) -> list[str]:
        """The model's parameters that do not move in this stage; their `requires_grad` is off already."""
        return [name for name, _ in self.model.named_parameters() if name not in self._job.moving]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters for an optimizer: what moves of the model, and what the method keeps beside it."""
        yield from (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        yield from (parameter for parameter in self._extras.values() if parameter.requires_grad)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the method's loss of a batch with everything that it adds: cross-entropy, proximal term, second head."""
        job = self._job
        return job.loss({**self._names, **self._extras}, job.beside, Batch(x.to(self.device), y.to(self.device)))

    def penalty(self) -> Tensor:
        """Return what the method adds to any loss: mu/2 times the squared distance from what was served, or 0."""
        job = self._job
        if job.penalty is None:
            return torch.zeros((), device=self.device)
        return job.penalty({**self._names, **self._extras}, job.beside)

    @property
    def needs(self) -> str:
        """Requirements of the method in this stage beyond a plain loop; empty if any loop will do."""
        if self._job.penalty is not None:
            return "it adds a term to the loss, context.penalty()"
        if self._extras:
            return f"it trains {len(self._extras)} tensors beside the model, context.parameters()"
        still = set(self.frozen) - names_of(self.model)
        return f"it holds {len(still)} of the model's parameters still in this stage, context.frozen" if still else ""

    def progress(self, done: float) -> None:
        """Report progress from 0 to 1, and end the loop if the work was replaced. Call it now and then.

        Raises:
            Cancelled: The work was replaced.
        """
        if self._job.task.cancelled():
            raise Cancelled("this work was replaced")
        self._job.progress(min(max(done, 0.0), 1.0))


def check_loop(configured: ConfiguredMethod, private: bool = False) -> None:
    """Refuse a method whose training cannot be a user's own loop.

    Args:
        configured: The method.
        private: Devices train with noise.

    Raises:
        SettingError: The method cannot be trained by a loop; the message says why.
    """
    if private:
        raise SettingError(
            "this federation trains with noise (privacy.unit), and a training loop of your own does not clip the gradients of "
            "single samples. Leave train out"
        )
    why = configured.objective.own_loop
    if why:
        raise SettingError(
            f"method {configured.method.name} cannot be trained by a loop of your own: {why}. "
            "Leave train out, or choose another method"
        )


def with_loop(work: Jobs[T], train: Train, classes: Sequence[int | str]) -> Jobs[T]:
    """Run `work` with `train` for its descents; other jobs are yielded."""
    try:
        job = next(work)
        while True:
            try:
                result = _carried_out(job, train, classes) if isinstance(job, Descent) else (yield job)
            except Exception as error:
                job = work.throw(error)
            else:
                job = work.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


def _carried_out(job: Descent, train: Train, classes: Sequence[int | str]) -> Trained:
    """Run a descent by the user's loop.

    Raises:
        TrainingDiverged: The loss or a tensor is not finite.
        Cancelled: The work was replaced.
        SettingError: The loop raised an error, or returned something else than a loss.
    """
    task = job.task
    if not job.moving:
        return job.alone()
    model, extras = _loaded(job)
    training_mode(task.network.model)
    data = Data(
        task.x.clone(),  # the loop may change what it is given
        task.y.clone(),
        classes,
        job.settings.batch_size,
        job.batch_seed(job.purpose),
        task.network.normalises_batches,
    )
    with seeded(task.device, task.seeds(f"dropout {job.purpose}".strip()), everything=True):
        try:
            said = train(model, data, Context(job, model, extras))
        except AttuneError:
            raise
        except Exception as error:
            # Whatever a user's code raises is an error of this training.
            raise SettingError(f"your train() failed: {type(error).__name__}: {error}") from error
    if task.cancelled():
        raise Cancelled("this work was replaced")
    kept = kept_state(task.state, sum(value.nbytes for value in job.tensors.values()))
    task.state.clear()
    task.state.update(kept)
    taken = _taken(job, model, extras)
    if all(torch.equal(taken[name], job.tensors[name]) for name in job.moving):
        warnings.warn(UNMOVED, stacklevel=2)  # Python says it once
    return Trained(taken, _loss_of(said))


def kept_state(state: Mapping[Any, Any], model_bytes: int) -> Tensors:
    """Return what a loop keeps as tensors on the CPU that can be written.

    Raises:
        SettingError: A name or a value cannot be kept, or all values together are larger than STATE_BYTES and
            STATE_MODELS models.
    """
    kept: Tensors = {}
    limit = max(STATE_BYTES, STATE_MODELS * model_bytes)
    for name, value in state.items():
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            raise SettingError(
                f"your train() kept context.state[{str(name)[:80]!r}]; names are text of 1 to {LONGEST_NAME} letters"
            )
        if not isinstance(value, Tensor | np.ndarray | np.number | int | float) or (
            isinstance(value, Tensor) and value.layout != torch.strided
        ):
            raise SettingError(
                f"your train() kept context.state[{name!r}], a {type(value).__name__}, which cannot be kept: tensors, arrays "
                "and numbers can"
            )
        try:
            kept[name] = torch.as_tensor(value).detach().cpu().clone()
        except (TypeError, RuntimeError, ValueError) as error:
            raise SettingError(f"your train() kept context.state[{name!r}], which cannot be kept: {error}") from None
        if kept[name].dtype not in DTYPES.values():
            raise SettingError(f"your train() kept context.state[{name!r}] of type {kept[name].dtype}, which cannot be kept")
    if len(kept) > STATE_NAMES or (size := sum(value.nbytes for value in kept.values())) > limit:
        what = f"{len(kept)} names, more than {STATE_NAMES}" if len(kept) > STATE_NAMES else f"{size} bytes, more than {limit}"
        raise SettingError(f"your train() kept {what}, in context.state: keep less")
    return kept


def _loaded(job: Descent) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return (a separate model with the descent's tensors, the tensors beside it as parameters)."""
    model = copy.deepcopy(job.task.network.model).to(job.task.device)
    training_mode(model)
    model_tensors, _ = split(job.tensors)
    with torch.no_grad():
        for name, value in _live(model):
            value.copy_(model_tensors[name])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in job.moving)
    beside = {name: tensor for name, tensor in job.tensors.items() if name not in model_tensors}
    return model, {name: nn.Parameter(tensor.clone(), requires_grad=name in job.moving) for name, tensor in beside.items()}


def _live(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's own tensors by the names under which they travel, not detached."""
    from attune.common.models.structure import tensors_of

    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return ((name, state[name]) for name in tensors_of(model))


def _taken(job: Descent, model: nn.Module, extras: Mapping[str, Tensor]) -> Tensors:
    """Return the trained tensors, and running statistics if they may move; all others are as before, bit for bit.

    Raises:
        TrainingDiverged: A tensor is not finite.
    """
    live = {**dict(_live(model)), **extras}
    parameters = job.task.network.parameters

    def moved(name: str) -> bool:
        plain = name in job.task.network.names and name not in parameters
        return name in job.moving or (plain and job.task.takes(name, job.is_own))

    taken = {name: live[name].detach().clone() if moved(name) else tensor for name, tensor in job.tensors.items()}
    for name in job.moving:
        if not bool(taken[name].isfinite().all()):
            raise TrainingDiverged(f"your train() left {name} with values that are not finite")
    return taken


def _loss_of(said: Any) -> float:
    value = said.get("loss") if isinstance(said, Mapping) else said
    if value is None:
        return math.nan
    try:
        loss = float(value)
    except (TypeError, ValueError):
        raise SettingError(
            f"your train() returned a {type(said).__name__}; return the loss, a dict with it, or nothing"
        ) from None
    if not math.isfinite(loss):
        raise TrainingDiverged(f"your train() returned the loss {loss}")
    return loss


class Predicting(nn.Module):
    """Module that predicts as the device does: with the predictor of a method, or a blend of several models."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self._logits = logits

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, ..., C) of x (B, ...)."""
        scores: Tensor = self._logits(x)
        return scores


def scored(evaluate: Evaluate, logits: Any, data: Data) -> Tensor:
    """Return the score of each sample, (N,), 0 to 1, by the user's function; float64 on the CPU.

    Raises:
        SettingError: The function raised an error, or returned something else.
    """
    try:
        with torch.no_grad():
            said = evaluate(Predicting(logits).eval(), replace(data, x=data.x.clone(), y=data.y.clone()))
    except AttuneError:
        raise
    except Exception as error:
        raise SettingError(f"your evaluate() failed: {type(error).__name__}: {error}") from error
    scores = torch.as_tensor(said).detach().double().cpu() if not isinstance(said, float | int) else torch.tensor(said)
    if scores.shape != (len(data),):
        raise SettingError(
            f"your evaluate() returned {type(said).__name__} of shape {tuple(scores.shape)}; return a score for each of the "
            f"{len(data)} samples, so that models can be compared on the same ones"
        )
    if not bool(((scores >= 0) & (scores <= 1)).all()):
        raise SettingError("your evaluate() returned scores outside 0 to 1; the best score of a sample is 1")
    return scores
