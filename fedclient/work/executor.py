"""Jobs and what carries them out: work stops at each heavy computation, and an executor decides how orders are computed.

A generator yields jobs and is sent their results. `alone` computes each job at once, by itself. fedclient.work.stacked runs the
generators of many devices side by side and computes like jobs together. Orders are carried out one by one or stacked in this
process, or in other processes. torch is imported by the first learner that is made, not here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

import msgspec
from msgspec.structs import replace

from attune.common.errors import AttuneError
from attune.common.plan import Plan, Scale

if TYPE_CHECKING:
    from attune.common.exchange.messages import BlobRef, Order
    from attune.common.wire.header import Manifest
    from attune.fedclient.data.standardiser import Standardiser
    from attune.fedclient.messages import OrderResult
    from attune.fedclient.work.learner import Learner
    from attune.fedclient.work.objectives.base import OnProgress, Tensors
    from attune.fedclient.work.orders import OrderStore
    from attune.fedclient.work.stacked.lockstep import Stacked


T = TypeVar("T", covariant=True)


class Job(Protocol):
    """One computation of one device, with all that it needs."""

    def alone(self) -> Any:
        """Return the job's result by its definition. Every other way to compute it must agree."""


Jobs = Generator[Job, Any, T]  # that return a T


class Cancelled(AttuneError):
    """Another order replaced this one within the device.

    What to do: No action is needed.
    """

    kind = "cancelled"


class FailedWork(msgspec.Struct, frozen=True):
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


SEQUENTIAL, STACKED, PROCESSES, RAY = "sequential", "stacked", "processes", "ray"
EXECUTORS = (SEQUENTIAL, STACKED, PROCESSES, RAY)
IN_OTHER_PROCESSES = (PROCESSES, RAY)  # models that other processes cannot import cannot be used with these
ExecutorName = Literal["sequential", "stacked", "processes", "ray"]


class HostLost(Exception):
    """The process that held a learner is gone. What the learner has committed is kept."""


class HostDied(HostLost):
    """The process ended while it worked on a request."""


class AnyLearner(Protocol):
    """A learner of this process (fedclient.work.learner says what each of these is) or one that lives in another process."""

    plan: Plan
    name: str
    orders: OrderStore

    @property
    def newest(self) -> OrderResult | None: ...

    @property
    def standardiser(self) -> Standardiser | None: ...

    @property
    def targets(self) -> Scale | None: ...

    @property
    def size_bytes(self) -> int: ...

    def missing(self, order: Order) -> list[tuple[BlobRef, Manifest]]: ...

    def carry_out(self, work: Work) -> OrderResult:
        """Carry out an order of this learner. May raise HostLost too."""

    def finished(self) -> dict[str, Tensors]: ...

    def let_go(self) -> None: ...


class Work(msgspec.Struct, frozen=True):
    """An order whose values are all here.

    Attributes:
        learner: The learner of the device that has the order.
        order: The order.
        fetched: digest -> tensors, for everything that `learner.missing` named.
        bytes_down: How many bytes were fetched.
        progress: Is told the share that is done, 0 to 1.
        cancelled: Whether to give the work up.
    """

    learner: AnyLearner
    order: Order
    fetched: Mapping[str, Tensors] = {}
    bytes_down: int = 0
    progress: OnProgress = lambda done: None
    cancelled: Callable[[], bool] = lambda: False

    def run(self) -> OrderResult:
        """Carry it out now. Raises what the learner's carry_out raises."""
        return self.learner.carry_out(self)

    def cancelled_by(self, stopped: Callable[[], bool], **changes: Any) -> Work:
        """Return the same work, with some changes, which is given up as well when `stopped` turns true."""
        return replace(self, cancelled=lambda: stopped() or self.cancelled(), **changes)


class Executor(Protocol):
    """Interface for carrying out the orders of several devices."""

    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        """Begin all works; return a future for each, in the same order. An executor in this process returns them done."""


class SequentialExecutor:
    """Implements Executor: one order after the other."""

    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        return [_carried_out(work) for work in works]


def _carried_out(work: Work) -> Future[OrderResult]:
    try:
        return done(work.run())
    except Exception as error:
        return done(error)


def done(outcome: OrderResult | Exception) -> Future[OrderResult]:
    """Return a future that is done, with this result or error."""
    return _Done(outcome)


class _Done(Future["OrderResult"]):
    """A future without the locks by which threads wait for another one."""

    def __init__(self, outcome: OrderResult | Exception) -> None:
        self._outcome = outcome

    def __repr__(self) -> str:
        return f"_Done({self._outcome!r})"

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> OrderResult:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def exception(self, timeout: float | None = None) -> Exception | None:
        return self._outcome if isinstance(self._outcome, Exception) else None


async def result_of(future: Future[OrderResult]) -> OrderResult:
    """Return the result, without giving way to other tasks if it is there already. Raises what the work raised."""
    return future.result() if future.done() else await asyncio.wrap_future(future)


class StackedExecutor:
    """Implements Executor: many devices at once, in the thread of the tensors, which imports torch with the first orders."""

    def __init__(self) -> None:
        self.stacked: Stacked | None = None

    @property
    def reasons(self) -> list[str]:
        """The reasons for which some work went one by one, each once."""
        return self.stacked.reasons if self.stacked is not None else []

    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        from attune.fedclient.work.stacked.lockstep import Stacked

        self.stacked = self.stacked or Stacked()
        ended = self.stacked.run([cast("Learner", work.learner).jobs(work) for work in works])
        return [done(end.error if isinstance(end, FailedWork) else end) for end in ended]
