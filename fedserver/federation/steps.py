"""Steps that are carried through: one turn after another, errors that can pass, and the clocks.

A turn may be asked for by a peer's call, which is cancelled when the peer vanishes. So the work is a separate task; the caller
waits for it and can go away. An error that can pass is tried again with back-off, and the operator is told.
What the operator is told is a trouble: a store that cannot be used, whichever call met it, or what a step waits for.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from attune.common.config import RoundSettings
from attune.common.durable import NO_SPACE
from attune.common.errors import AttuneError, DiskFull, HomeMismatch, LedgerBusy
from attune.common.exchange.messages import WorkName
from attune.fedserver.core.state import LIMIT, PATIENCE, SHARE
from attune.fedserver.ports.blobs import INBOX, UPLOADS, Blobs
from attune.fedserver.ports.ledger import MemberLedger
from attune.fedserver.ports.storage import Storage

T = TypeVar("T")
LOG = logging.getLogger("fedserver")
PASSING = (*NO_SPACE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
UNWRITABLE = (errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM)  # the operator must act, and devices can wait
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 30.0
PASSED_OVER = (
    "let {} {} in a row run out, or {} within a short time: it is not asked before it connects anew or reports progress, nor "
    "while others have waited for it for more than {:.0%} of the time; look at its log, and whether round.deadline_s is long "
    "enough for it"
)
DOOR = "looking after connections"  # a trouble that keeps all devices out, as those of the stores do
LEDGER, BLOBS, DISK = STORES = ("ledger", "blobs", "disk")  # troubles: the database, the S3 store, and files of this machine
TRIED = f"{UPLOADS}tried"  # a blob of the home by which the disk is tried
TRIED_BLOB = f"{INBOX}tried"  # the same, for the store of blobs
SHOWN = 3  # names in a line of the log


class Clock(msgspec.Struct, frozen=True):
    """Clocks of a process, as values that tests can replace.

    Attributes:
        monotonic: Seconds, for spans; no person can set it.
        unix: The time of day, for people.
        stands: The monotonic clock does not move, so no deadline passes.
    """

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time
    stands: bool = False


async def _raise(error: Exception) -> None:
    raise error


class Turns:
    """Queue of work, of which one piece has the turn."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._began_at: float | None = None
        self.met: Callable[[BaseException], object] = store_of  # is told of errors that no caller hears: see Troubles.met
        self.failed: Callable[[Exception], Coroutine[Any, Any, None]] = _raise  # is told, in the turn, of a step's error

    @property
    def busy_s(self) -> float:
        """Seconds since the present turn began; 0 if there is none."""
        return 0.0 if self._began_at is None else time.monotonic() - self._began_at

    async def take(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in a turn, and return its result. Cancelling the caller does not cancel the work."""
        return await asyncio.shield(self.start(self._in_turn(work)))

    async def step(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T | None:
        """Run `work(*arguments)` in a turn. Its errors fail the federation's step and do not reach the caller (None)."""
        return await self.take(partial(self.or_failed, work, *arguments))

    async def or_failed(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T | None:
        """Run `work(*arguments)` for a caller that has the turn, as `step` does."""
        try:
            return await work(*arguments)
        except Exception as error:
            await self.failed(error)
            return None

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that needs no turn, and return its task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def carry(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work that needs no turn, and return its result. Cancelling the caller does not cancel the work."""
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unheard)  # the caller is gone
            raise

    async def stop(self) -> None:
        """Cancel the work under way, because the process ends. A restart continues it."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _in_turn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._turn:
            self._began_at = time.monotonic()
            try:
                return await work()
            finally:
                self._began_at = None

    def _unheard(self, task: asyncio.Task[Any]) -> None:
        """Take the result of work whose caller is gone. A store that fails is a trouble; the caller comes again.

        A refusal is not logged: it is about what the caller has sent, and a peer that hangs up early must not fill the log.
        """
        if task.cancelled() or (error := task.exception()) is None or self.met(error):
            return
        if not isinstance(error, AttuneError) or isinstance(error, HomeMismatch):
            LOG.error("%s", error, exc_info=error)


class InlineTurns(Turns):
    """Turns of a process in which no peer's call can be cancelled: work runs within its caller, without a separate task."""

    async def take(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._in_turn(work)

    async def carry(self, work: Coroutine[Any, Any, T]) -> T:
        return await work


def can_pass(error: BaseException) -> bool:
    """Return whether the same step may succeed later without a restart.

    An example is a lock that is released, or a full disk on which space is freed.
    """
    return isinstance(error, (LedgerBusy, DiskFull)) or (isinstance(error, OSError) and error.errno in PASSING)


def store_of(error: BaseException) -> str:
    """Return the store, of `STORES`, that an error says to be out of use; empty if it says so of none."""
    if isinstance(error, LedgerBusy):
        return error.store
    unusable = isinstance(error, OSError) and error.errno in (*PASSING, *UNWRITABLE)
    return DISK if unusable or isinstance(error, DiskFull) else ""


class Troubles:
    """Present obstacles, by name: a store that cannot be used now, or the step that something else holds up.

    Any call may meet a store's failure (`met`), and only a call of the same store that succeeds clears it.
    """

    def __init__(self) -> None:
        self._present: dict[str, str] = {}

    @property
    def lines(self) -> list[str]:
        """One line per obstacle, for people."""
        return [f"{step}: {text}" for step, text in sorted(self._present.items())]

    def keeping_out(self) -> list[str]:
        """Return a line for each obstacle that keeps all devices out; others, such as a device that is missing, do not."""
        return [f"{step}: {self._present[step]}" for step in (DOOR, *STORES) if step in self._present]

    @property
    def stores(self) -> list[str]:
        """Stores that cannot be used now."""
        return [store for store in STORES if store in self._present]

    def met(self, error: BaseException) -> str:
        """Note the store that an error says to be out of use, and return it; empty: none. The log gets it once."""
        if store := store_of(error):
            if store not in self._present:
                LOG.warning("%s: %s (trying again)", store, error)
            self._present[store] = str(error)
        return store

    def set(self, step: str, text: str, *, tries: bool = True) -> None:
        """Note an obstacle, and whether the step is tried again. The log gets it once, however often it is set."""
        if self._present.get(step) != text:
            LOG.warning("%s: %s%s", step, text, " (trying again)" if tries else "")
        self._present[step] = text

    def clear(self, step: str) -> None:
        if self._present.pop(step, None) is not None:
            LOG.info("%s: goes on", step)

    def show(self, step: str, text: str) -> None:
        """Note an obstacle, or that there is none any more (empty text)."""
        if text:
            self.set(step, text)
        elif step in self._present:
            self.clear(step)

    async def overcome(self, step: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Retry `attempt` until it succeeds, and return its result.

        Raises:
            Exception: An error of `attempt` that cannot pass.
        """
        delay_s, lost = FIRST_DELAY_S, set[str]()
        while True:
            try:
                result = await attempt()
            except Exception as error:
                if not can_pass(error):
                    raise
                if (store := self.met(error)) not in lost:
                    LOG.info("%s waits for the %s", step, store)
                lost.add(store)
            else:
                for store in lost:
                    self.clear(store)
                return result
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def keep_up(self, step: str, watch: Callable[[], Awaitable[None]]) -> None:
        """Run a watch to its end, and start it again whenever it fails: without it no limit and no revocation would hold.

        The obstacle stays in the status until the process ends, so that the operator sees it.
        """
        while True:
            try:
                return await watch()
            except Exception as error:
                LOG.error("%s failed", step, exc_info=error)
                self.set(step, f"it failed, and was started again ({type(error).__name__}: {error})", tries=False)
            await asyncio.sleep(FIRST_DELAY_S)


async def try_stores(troubles: Troubles, storage: Storage, size: int) -> None:
    """Use each store that is in trouble once, and clear the trouble if the call is good. Others may not call it for hours.

    Args:
        troubles: The obstacles.
        storage: The stores.
        size: Bytes of the largest blob for which the disk must have room.
    """
    for store in troubles.stores:
        try:
            if store == LEDGER:
                await storage.ledger.tried()
            else:
                await asyncio.to_thread(_try_blobs, storage.blobs, store, size)
        except Exception as error:
            if not troubles.met(error):
                raise
        else:
            troubles.clear(store)


def _try_blobs(blobs: Blobs, store: str, size: int) -> None:
    """Write, read and remove a small blob. On the disk there must also be room for one of `size` bytes."""
    if store == DISK:
        blobs.create(TRIED, size).abort()
    name = TRIED if store == DISK else TRIED_BLOB
    blobs.put(name, b"tried")
    blobs.get(name)
    blobs.remove([name])


def _aside(work: WorkName) -> str:
    return PASSED_OVER.format(PATIENCE, "orders" if work == "train" else "evaluations", LIMIT, 1 / SHARE)


class PassedOver:
    """Notes for the operator about devices that are passed over or whose updates are bounded."""

    def __init__(self, ledger: MemberLedger, troubles: Troubles) -> None:
        self._ledger, self._troubles = ledger, troubles
        self._told: set[str] = set()  # devices whose first bounded change was a warning

    async def pass_over(self, devices: Iterable[str], work: WorkName) -> None:
        for name in devices:
            LOG.warning("%s %s", name, _aside(work), extra={"device": name})
            await self._note(name, _aside(work))

    async def ask_again(self, devices: Iterable[str], work: WorkName) -> None:
        """Remove the note of devices that are asked again. A newer note stays."""
        for name in devices:
            LOG.info("%s is asked again", name, extra={"device": name})
            device = await self._troubles.overcome("reading a device's note", partial(self._ledger.device, name))
            if device is not None and device.note == _aside(work):
                await self._note(name, "")

    async def bounded(self, number: int, bounded: Mapping[str, float], without_vote: Collection[str]) -> None:
        """Note the devices whose updates were bounded.

        The first time of a device is a warning. Honest devices with unlike data pass the bound in most rounds, so later times
        are information.

        Args:
            number: The round.
            bounded: Norm of each bounded device, in medians of the cohort.
            without_vote: Devices whose update did not count at all.
        """
        if not bounded:
            return
        largest = sorted(bounded, key=lambda name: -bounded[name])
        more = f" and {len(bounded) - SHOWN} more" if len(bounded) > SHOWN else ""
        said = ", ".join(f"{name} ({bounded[name]:.3g})" for name in largest[:SHOWN])
        level = logging.INFO if bounded.keys() <= self._told else logging.WARNING
        self._told |= bounded.keys()
        LOG.log(level, "round %d: bounded against the cohort, with their norms of change in medians: %s%s", number, said, more)
        for name, medians in bounded.items():
            result = "it had no vote" if name in without_vote else "it was bounded"
            await self._note(name, f"in round {number} its change was {medians:.3g} times the cohort's median norm; {result}")

    async def too_stale(self, name: str, age: int, settings: RoundSettings) -> str:
        """Note that a device's update was discarded, and return why."""
        most = f"at most {settings.max_staleness} are allowed (round.max_staleness)"
        why = f"its update is {age} states old and does not count: {most}"
        LOG.warning("%s: %s", name, why, extra={"device": name})
        await self._note(name, why)
        return why

    async def _note(self, name: str, text: str) -> None:
        await self._troubles.overcome("writing a device's note", partial(self._ledger.update_device, name, note=text))
