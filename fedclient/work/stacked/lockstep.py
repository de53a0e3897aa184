"""Work of many devices side by side: like jobs are computed together, the others one by one, with the reason.

Why devices cannot be computed together is found by what a model consists of, and by trying it on a sample or two.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from msgspec import UNSET
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.dropout import _DropoutNd

from attune.common.config import TrainSettings
from attune.common.models.body import training_mode
from attune.fedclient.work.blend import Weighing
from attune.fedclient.work.executor import FailedWork, Job, Jobs
from attune.fedclient.work.objectives.base import Batch, Network, Tensors
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.stacked.descend import descend, gradients_of, stacked, used_gradients
from attune.fedclient.work.stacked.noisy_stack import against_noise
from attune.fedclient.work.stacked.scoring import PaddedSamples, rate, score, weigh
from attune.fedclient.work.trainer import Accuracy, Scores


def against_training(jobs: Sequence[Descent]) -> str:
    """Return why similar descents run one by one; empty if they need not."""
    job = jobs[0]
    return (
        job.by_itself
        or ("" if job.task.measure.by_sample else "the loss compares the samples of a batch")
        or _of_settings(job.settings)
        or _of_precision(job.settings.mixed_precision)
        or _of_layers(job.task.network)
        or against_noise(job)
        or _trained(jobs)
    )


def against_scoring(jobs: Sequence[Scores | Accuracy]) -> str:
    """Return why similar evaluations run one by one; empty if they need not."""
    trainer = jobs[0].trainer
    return trainer.predictor.by_itself or _of_precision(trainer.settings.mixed_precision) or _scored(jobs)


def _of_settings(settings: TrainSettings) -> str:
    if settings.optimizer not in (UNSET, "sgd"):
        return f"the optimizer is {settings.optimizer}, and only SGD is stacked"
    if settings.schedule not in (UNSET, "constant"):
        return "the learning rate changes from step to step"
    return "images are augmented by draws of each device's own" if settings.augment else ""


def _of_precision(mixed_precision: str) -> str:
    return "" if mixed_precision == "off" else f"in {mixed_precision} two ways to add up need not agree"


def _of_layers(network: Network) -> str:
    for name in sorted(network.names - network.parameters):
        return f"training may change {name}, which is no parameter, in place, as it does running statistics"
    if network.normalises_batches:
        return "the model normalises batches, so that a sample's scores depend on the other samples of its batch"
    for name, module in network.model.named_modules():
        if _drops(module):
            return f"{name} drops units at random, by draws of each device's own"
        if isinstance(module, nn.RNNBase):
            return f"torch has no operator for many recurrent layers such as {name} at once"
    return ""


def _drops(module: nn.Module) -> bool:
    """Return whether a layer uses dropout: a share `p`, or `dropout` in recurrent and attention layers."""
    share = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(share, int | float) and share > 0


def _trained(jobs: Sequence[Descent]) -> str:
    """Check by the gradients of one sample each, and whether the samples of a batch are independent."""
    job, pair = jobs[0], jobs[:2]
    x = _first_samples([one.task.x for one in pair]).to(job.task.device)
    y = _first_samples([one.task.y for one in pair]).to(job.task.device)
    tensors, beside = stacked([one.tensors for one in pair]), stacked([one.beside for one in pair])
    weight = torch.ones(len(x), 1, dtype=tensors[job.moving[0]].dtype, device=job.task.device)
    training_mode(job.task.network.model)
    try:
        mapped, _ = gradients_of(job, tensors, beside, Batch(x[:, None], y[:, None], weight))
        alone = _gradients(job, Batch(x[:1], y[:1]))
        both, first = (job.task.network(job.tensors, some_x).detach() for some_x in (x, x[:1]))
    except Exception as error:
        return _not_mapped(error)
    wrong = next((name for name in alone if name not in mapped or not _alike(mapped[name][0], alone[name])), None)
    return f"torch's mapping of the model over devices has another gradient of {wrong}" if wrong else _mixed(both, first)


def _gradients(job: Descent, batch: Batch) -> Tensors:
    leaves = {name: tensor.detach().clone().requires_grad_(name in job.moving) for name, tensor in job.tensors.items()}
    return used_gradients(job.loss(leaves, job.beside, batch), leaves, job.moving)


def _scored(jobs: Sequence[Scores | Accuracy]) -> str:
    trainer = jobs[0].trainer
    x = _first_samples([job.x for job in jobs[:2]]).to(trainer.device)
    tensors = [{name: tensor.to(trainer.device) for name, tensor in job.prepared.items()} for job in jobs[:2]]
    trainer.network.model.eval()
    try:
        with torch.no_grad():
            logits = partial(trainer.predictor.logits, trainer.network)
            vmap(logits)(stacked(tensors), x[:, None])
            both, first = (logits(tensors[0], some) for some in (x, x[:1]))
    except Exception as error:
        return _not_mapped(error)
    return _mixed(both, first)


def _first_samples(samples: Sequence[Tensor]) -> Tensor:
    """Return the first sample of each device."""
    return torch.stack([x[0] for x in samples])


def _not_mapped(error: Exception) -> str:
    return f"torch cannot map the model over devices: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _mixed(both: Tensor, first: Tensor) -> str:
    """Check that padding a batch does not change the scores of its samples."""
    return "" if _alike(both[:1], first) else "a sample's scores depend on the other samples of its batch"


def _alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)


T = TypeVar("T")


def _result_of(compute: Callable[[], T]) -> T | FailedWork:
    try:
        return compute()
    except Exception as error:
        return FailedWork(error)


class Stacked:
    """Runner of works side by side, which remembers why some jobs cannot be computed together."""

    def __init__(self) -> None:
        self._reasons: dict[Hashable, str] = {}
        padded = PaddedSamples()
        # Kind of job -> what computes like ones together, and why it may not.
        self._together: dict[type, tuple[Callable[[Any], Sequence[Any]], Callable[[Any], str]]] = {
            Descent: (descend, against_training),
            Scores: (partial(score, padded=padded), against_scoring),
            Accuracy: (partial(rate, padded=padded), against_scoring),
            Weighing: (weigh, lambda jobs: ""),
        }

    @property
    def reasons(self) -> list[str]:
        """Why something went one by one, each reason once. A job that never met a similar one has none."""
        return sorted({reason for reason in self._reasons.values() if reason})

    def run(self, works: Iterable[Jobs[T]]) -> list[T | FailedWork]:
        """Return each work's result in order, as if it ran alone. A failure of one does not affect another."""
        runs = [_Run(work) for work in works]
        while waiting := [run for run in runs if run.job is not None]:
            some = _next(waiting)
            for run, result in zip(some, self._computed(some[0].key, [run.job for run in some]), strict=True):
                run.go_on(result)
        return [run.end for run in runs]

    def _computed(self, key: Hashable, jobs: Sequence[Any]) -> list[Any]:
        """Return the result of each of similar jobs, or FailedWork."""
        if len(jobs) == 1:
            return [_result_of(jobs[0].alone)]
        compute, against = self._together[type(jobs[0])]
        if key not in self._reasons:
            self._reasons[key] = against(jobs)
        if self._reasons[key]:
            return [_result_of(job.alone) for job in jobs]
        return [FailedWork(result) if isinstance(result, Exception) else result for result in compute(jobs)]


class _Run(Generic[T]):
    """One device's work: the job that it waits for, with what jobs computed together have in common; or how it ended."""

    job: Job | None
    key: Hashable
    end: T | FailedWork

    def __init__(self, work: Jobs[T]) -> None:
        self._work = work
        self.go_on(None)

    def go_on(self, result: Any) -> None:
        """Pass on the result for which the work waits."""
        try:
            self.job = self._work.throw(result.error) if type(result) is FailedWork else self._work.send(result)
            self.key = _key(self.job)
        except StopIteration as ended:
            self.job, self.end = None, ended.value
        except Exception as error:
            self.job, self.end = None, FailedWork(error)


def _next(waiting: Sequence[_Run[T]]) -> list[_Run[T]]:
    """Return works that wait for similar jobs. Training comes last, so that late works can join in."""
    first = next((run for run in waiting if type(run.job) is not Descent), waiting[0])
    return [run for run in waiting if run.key == first.key]


def _key(job: Any) -> Hashable:
    """Return a key that is equal for jobs that can be computed together, if any can."""
    kind: Any = type(job)  # of which no job has a subclass
    if kind is Descent and job.task.family is not None and job.task.x.shape[0] and job.moving:
        loop = (job.moving, job.undecayed, job.purpose, job.share, job.is_own, job.repeat, job.ahead)
        what = (job.settings, *loop, job.noise is not None)
        tensors = (_shapes(job.tensors), _shapes(job.beside))
        x, y = job.task.x, job.task.y
        return ("descent", job.task.family, what, tensors, x.shape[1:], x.dtype, y.shape[1:], y.dtype, job.task.device)
    if kind is Scores and job.trainer.family is not None and job.x.shape[0]:
        return ("scores", job.trainer.family, _shapes(job.prepared), job.x.shape[1:], job.x.dtype, job.trainer.device)
    if kind is Accuracy and job.trainer.family is not None and job.x.shape[0]:
        samples = (job.x.shape[1:], job.x.dtype, job.y.shape[1:], job.y.dtype)
        return ("accuracy", job.trainer.family, _shapes(job.prepared), samples, job.trainer.device)
    if kind is Weighing:
        return ("weighing", tuple(job.probability), *{p.shape[1:] for p in job.probability.values()})
    return id(job)


def _shapes(tensors: Mapping[str, Tensor]) -> Hashable:
    return tuple([(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()])
