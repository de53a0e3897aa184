"""asyncio as Python 3.11 has it, also on 3.10: counted cancellations, and the timeouts and task groups that rest on them.

On 3.10 `taskgroup` brings them: the code of 3.12, ported back. Tasks count there in a loop that `run` or `Runner` has made. So
a deadline that ends in the moment in which somebody cancels the task swallows no cancellation, and is a TimeoutError.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    from asyncio import Runner, Task, TaskGroup, timeout  # novm
else:
    from taskgroup import Runner, TaskGroup, timeout
    from taskgroup.tasks import Task

__all__ = ["Runner", "TaskGroup", "cancelling", "run", "timeout"]

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, which on 3.10 does not count."""
    with Runner() as runner:
        return runner.run(main)


def cancelling() -> bool:
    """Whether somebody cancels the task that runs."""
    task = asyncio.current_task()
    assert isinstance(task, Task), "this loop does not count cancellations: run it by attune.common.aio"  # noqa: S101
    return task.cancelling() > 0
