"""Work of many devices side by side: like jobs are computed together, the others one by one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from attune.fedclient.work.blend import Weighing
from attune.fedclient.work.job import FailedWork, Job, Jobs, alone
from attune.fedclient.work.objectives.descent import Descent
from attune.fedclient.work.stacked import reasons
from attune.fedclient.work.stacked.descend import descend
from attune.fedclient.work.stacked.scoring import PaddedSamples, rate, score, weigh
from attune.fedclient.work.trainer import Accuracy, Scores

T = TypeVar("T")


def one_by_one(works: Iterable[Jobs[T]]) -> list[T | FailedWork]:
    """Return each work's result in order. A failure of one does not affect another."""
    return [_result_of(partial(alone, work)) for work in works]


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
            Descent: (descend, reasons.against_training),
            Scores: (partial(score, padded=padded), reasons.against_scoring),
            Accuracy: (partial(rate, padded=padded), reasons.against_scoring),
            Weighing: (weigh, lambda jobs: ""),
        }

    def __repr__(self) -> str:
        return f"Stacked({self.reasons})"

    @property
    def reasons(self) -> list[str]:
        """Why something went one by one, each reason once. A job that never met a similar one has none."""
        return sorted({reason for reason in self._reasons.values() if reason})

    def run(self, works: Iterable[Jobs[T]]) -> list[T | FailedWork]:
        """Return each work's result in order, as if it ran alone. A failure of one does not affect another."""
        runs = [_Run(work) for work in works]
        while waiting := [run for run in runs if run.job is not None]:
            some = _next(waiting)
            for run, result in zip(some, self._computed(some[0].key, [cast(Job, run.job) for run in some]), strict=True):
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
            self.job = self._work.throw(result.error) if isinstance(result, FailedWork) else self._work.send(result)
            self.key = _key(self.job)
        except StopIteration as ended:
            self.job, self.end = None, ended.value
        except Exception as error:
            self.job, self.end = None, FailedWork(error)


def _next(waiting: Sequence[_Run[T]]) -> list[_Run[T]]:
    """Return works that wait for similar jobs. Training comes last, so that late works can join in."""
    first = min(waiting, key=lambda run: isinstance(run.job, Descent))
    return [run for run in waiting if run.key == first.key]


def _key(job: Job) -> Hashable:
    """Return a key that is equal for jobs that can be computed together, if any can."""
    if isinstance(job, Descent) and job.task.family is not None and job.task.x.shape[0] and job.moving:
        loop = (job.moving, job.undecayed, job.purpose, job.share, job.is_own, job.repeat, job.ahead)
        what = (job.settings, *loop, job.noise is not None)
        tensors = (_shapes(job.tensors), _shapes(job.beside))
        return ("descent", job.task.family, what, tensors, _sample(job.task.x), _sample(job.task.y), job.task.device)
    if isinstance(job, Scores) and job.trainer.family is not None and job.x.shape[0]:
        return ("scores", job.trainer.family, _shapes(job.prepared), _sample(job.x), job.trainer.device)
    if isinstance(job, Accuracy) and job.trainer.family is not None and job.x.shape[0]:
        samples = (_sample(job.x), _sample(job.y))
        return ("accuracy", job.trainer.family, _shapes(job.prepared), samples, job.trainer.device)
    if isinstance(job, Weighing):
        return ("weighing", tuple(job.probability), *{p.shape[1:] for p in job.probability.values()})
    return id(job)


def _shapes(tensors: Mapping[str, Tensor]) -> Hashable:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in tensors.items())


def _sample(samples: Tensor) -> tuple[Hashable, Hashable]:
    return samples.shape[1:], samples.dtype
