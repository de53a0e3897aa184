"""The executor that computes many devices at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

from attune.fedclient.work.executor import Work, done

if TYPE_CHECKING:
    from attune.fedclient.messages import OrderResult
    from attune.fedclient.work.learner import Learner
    from attune.fedclient.work.stacked.lockstep import Stacked


class StackedExecutor:
    """Implements Executor. It belongs to the thread of the tensors, where torch is imported by the first orders."""

    def __init__(self) -> None:
        self.stacked: Stacked | None = None

    def __repr__(self) -> str:
        return f"StackedExecutor({self.stacked})"

    @property
    def reasons(self) -> list[str]:
        """Why some work went one by one, each reason once."""
        return self.stacked.reasons if self.stacked is not None else []

    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        from attune.fedclient.work.executor import FailedWork
        from attune.fedclient.work.stacked.lockstep import Stacked

        self.stacked = self.stacked or Stacked()
        ended = self.stacked.run([cast("Learner", work.learner).jobs(work) for work in works])
        return [done(end.error if isinstance(end, FailedWork) else end) for end in ended]
