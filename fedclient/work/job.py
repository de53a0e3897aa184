"""Work that stops at each heavy computation and waits for its result, so that the caller decides how to compute it.

A generator yields jobs and is sent their results. `alone` computes each job at once, by itself. fedclient.work.stacked runs the
generators of many devices side by side and computes like jobs together.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T", covariant=True)


class Job(Protocol):
    """One computation of one device, with all that it needs."""

    def alone(self) -> Any:
        """Return the job's result by its definition. Every other way to compute it must agree."""


Jobs = Generator[Job, Any, T]  # that return a T


@dataclass(frozen=True)
class FailedWork:
    """The error with which work ended, in place of a result."""

    error: Exception


def alone(work: Jobs[T]) -> T:
    """Run a generator of jobs one job after another, and return its result. Errors of a job are raised where it was yielded."""
    try:
        job = next(work)
        while True:
            try:
                result = job.alone()
            except Exception as error:
                job = work.throw(error)
            else:
                job = work.send(result)
    except StopIteration as end:
        value: T = end.value
        return value
