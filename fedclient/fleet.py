"""A hosted fleet: a device for each shard in one process, each with its own identity, home, seeds and connection.

The devices share only an event loop and the one thread that works on tensors (fedclient.work.worker). An error that ends
one device does not affect the others.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from attune.common import aio
from attune.common.errors import AttuneError, DiskFull, SettingError
from attune.common.statistics import RIVAL_WORDS, Verdict, shown_verdict
from attune.common.supervisor import supervised
from attune.common.task import SCORED
from attune.common.torch_state import plain_torch
from attune.fedclient import client
from attune.fedclient.address import backoff_s
from attune.fedclient.console import Console, line_of
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.home import DeviceHome
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.executor import ExecutorName, StackedExecutor
from attune.fedclient.work.processes.remote_executor import REMOTE_EXECUTORS, RemoteWorker
from attune.fedclient.work.worker import BatchingWorker, Worker

if TYPE_CHECKING:
    from attune.fedclient.messages import OrderResult

FEW = 5  # up to this number of devices, each prints its own lines
GATHER_S = 1.0  # equal lines within this time become one


class FleetConsole:
    """The devices `labels` on one screen. After `ended(label)` no summary waits for that device."""

    def __init__(self, screen: Console, labels: Iterable[str]) -> None:
        self.screen = screen
        self.alive = set(labels)
        self.few = len(self.alive) <= FEW
        self._waiting: list[tuple[str, str]] = []
        self._results: dict[tuple[int, bool], dict[str, OrderResult]] = {}  # (round, evaluated after it) -> device -> result

    def console_of(self, label: str) -> DeviceConsole:
        """Return the console of one device."""
        return DeviceConsole(self, label)

    def say(self, label: str, text: str) -> None:
        """Print a line at once for few devices; else within GATHER_S, together with devices that print the same."""
        if self.few:
            self.screen.say(f"{label}: {text}")
            return
        if not self._waiting:
            asyncio.get_running_loop().call_later(GATHER_S, self._flush_waiting)
        self._waiting.append((label, text))

    def result(self, label: str, result: OrderResult) -> None:
        """Print a result at once for few devices; else when all have reported the round, or one has reported a later round."""
        if self.few:
            self.screen.say(f"{label}: {line_of(result)}")
            return
        key = (result.round, not result.trained)
        for earlier in [other for other in self._results if other < key]:
            self._flush_results(earlier)
        self._results.setdefault(key, {})[label] = result
        self._flush_complete()

    def progress(self, what: str, done: float) -> None:
        """Show the fleet's progress in the round of the device that is working."""
        counted = len(self._results[max(self._results)]) if self._results else 0
        self.screen.progress(what, done if self.few else min(1.0, (counted + done) / max(1, len(self.alive))))

    def ended(self, label: str) -> None:
        self.alive.discard(label)
        self._flush_complete()

    def flush(self) -> None:
        """Print all lines that still wait for others."""
        self._flush_waiting()
        for key in sorted(self._results):
            self._flush_results(key)

    def _flush_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for line in agreeing(waiting):
            self.screen.say(line)

    def _flush_complete(self) -> None:
        for key in [key for key, results in self._results.items() if self.alive <= results.keys()]:
            self._flush_results(key)

    def _flush_results(self, key: tuple[int, bool]) -> None:
        self.screen.say(line_of_all(self._results.pop(key)))


class DeviceConsole(Console):
    """The console of one device of the fleet."""

    def __init__(self, console: FleetConsole, label: str) -> None:
        self.console, self.label = console, label
        self.last: OrderResult | None = None

    def say(self, text: str) -> None:
        self.console.say(self.label, text)

    def result(self, result: OrderResult) -> None:
        self.console.result(self.label, result)

    def kept(self, message: str, result: OrderResult, path: Path | None) -> None:
        # The table at the end shows it for all devices.
        self.last = result

    def progress(self, what: str, done: float) -> None:
        self.console.progress(what, done)


def agreeing(lines_of: Iterable[tuple[str, str]]) -> list[str]:
    """Return (name, text) pairs as lines.

    Texts that differ only in the name and in numbers become one line with their count.
    """
    groups: dict[str, dict[str, str]] = {}
    for name, text in lines_of:
        groups.setdefault(re.sub(r"\d+", "0", text.replace(name, "NAME")), {})[name] = text
    lines = []
    for texts in groups.values():
        name, text = list(texts.items())[-1]
        lines.append(f"{name}: {text}" if len(texts) == 1 else f"{len(texts)} devices, such as {name}: {text}")
    return lines


def line_of_all(results: Mapping[str, OrderResult]) -> str:
    """Return a line with means over the devices that have a value.

    An example is `round 3  100 devices  loss 0.41  accuracy 0.93 -> 0.97`.
    """
    import msgspec

    listed = list(results.values())
    means = {
        field: _mean([value for value in (getattr(result, field) for result in listed) if value is not None])
        for field in ("loss", "accuracy_before", "accuracy_after")
    }
    count = f"{len(listed)} device{'s' if len(listed) > 1 else ''}"
    return line_of(msgspec.structs.replace(listed[0], **means), count)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


TURNS = 2  # one device trains while the next one downloads
STACKED_TURNS = 256  # devices that hold tensors at one time where they are computed side by side
AWAKE_BYTES = 256 << 20  # memory for learners of waiting devices; others are dropped and made again from disk
THREADS = 16  # for calls that block without computing, such as the diagnosis of a server that does not answer
FILES_EACH, FILES_MORE = 4, 150  # open files: of each device (lock, connection, reserve); of the process (torch, a diagnosis)


@dataclass(frozen=True)
class DeviceOutcome:
    """How one device ended: with a model at `path`, or with `error`."""

    name: str
    path: Path | None = None
    result: OrderResult | None = None
    error: Exception | None = None


def run(members: Sequence[DeviceOptions], screen: Console, executor: ExecutorName = "sequential") -> list[DeviceOutcome]:
    """Run all devices until the last one ends.

    Args:
        members: Options of each device.
        screen: Screen for their output.
        executor: "sequential": one device after the other; "stacked": together; "processes": in a process per processor;
            "ray": in the workers of a Ray cluster, which must see the same files.

    Raises:
        SettingError: This process may not open enough files.
    """
    make_room(len(members))
    with plain_torch():
        return aio.run(_host(members, screen, executor))


def make_room(devices: int) -> None:
    """Raise the limit of open files as far as this process may.

    Raises:
        SettingError: The limit is still too low.
    """
    if sys.platform == "win32":
        return  # it has no such limit
    import resource

    needed = devices * FILES_EACH + FILES_MORE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise SettingError(
                f"{devices} devices need about {needed} open files, but this process may open {hard}: host fewer "
                f"(at most {max(0, hard - FILES_MORE) // FILES_EACH}), or raise the limit (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


async def _host(members: Sequence[DeviceOptions], screen: Console, executor: ExecutorName) -> list[DeviceOutcome]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="waiting"))
    console = FleetConsole(screen, [str(options.label) for options in members])
    with _worker(executor, screen) as worker:
        async with supervised(lambda: screen.last_line):
            outcomes = await asyncio.gather(*(_life(options, console, worker) for options in members))
    console.flush()
    return outcomes


@contextmanager
def _worker(executor: ExecutorName, screen: Console) -> Iterator[Worker]:
    """Yield the worker that computes for all devices."""
    if executor == "sequential":
        with Worker(TURNS, AWAKE_BYTES) as worker:
            yield worker
    elif executor in REMOTE_EXECUTORS:
        with REMOTE_EXECUTORS[executor]() as remote, RemoteWorker(remote, AWAKE_BYTES) as worker:
            yield worker
    else:
        stacked = StackedExecutor()
        with BatchingWorker(STACKED_TURNS, AWAKE_BYTES, stacked) as worker:
            yield worker
        for reason in stacked.reasons:
            screen.say(f"some work went one by one: {reason}")


async def _life(options: DeviceOptions, console: FleetConsole, worker: Worker) -> DeviceOutcome:
    label = str(options.label)
    device_console = console.console_of(label)
    assert options.home is not None  # noqa: S101 (members() gave every device one)
    home = DeviceHome(options.home)
    try:
        shard = await worker.do(LazyShard.on_disk, options.data, options.table, home.held_rows())
        with home.locked():
            path = await _lived(options, shard, home, device_console, worker)
        return DeviceOutcome(_name(home, label), path, device_console.last)
    except Exception as error:
        # Any error of one device is reported with its name, and the others continue.
        device_console.say(f"FAILED: {_text(error)}")
        return DeviceOutcome(_name(home, label), error=error)
    finally:
        console.ended(label)


async def _lived(options: DeviceOptions, shard: LazyShard, home: DeviceHome, console: Console, worker: Worker) -> Path:
    """Run a device as client.live does. It waits while the disk is full; the others go on meanwhile."""
    failures = 0
    while True:
        try:
            return await client.live(options, shard, home, console, worker)
        except DiskFull as full:
            failures += 1
            console.say(f"{full} (trying again)")
            await asyncio.sleep(backoff_s(failures))


def _name(home: DeviceHome, label: str) -> str:
    try:
        record = home.record()
    except (AttuneError, OSError):
        return label
    if record is None:
        return label
    return record.name if label in record.name else f"{label} ({record.name})"


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, AttuneError) else f"{type(error).__name__}: {error}"


def table(outcomes: Sequence[DeviceOutcome]) -> list[str]:
    """Return the lines of a table of all devices.

    The first lines have the mean accuracy, and for how many devices what they keep is better. Then each device has a line:
    name, accuracy, the model with the largest weight, whether what it keeps is better, path.
    """
    width = max(len(outcome.name) for outcome in outcomes)
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    metric = SCORED[results[0].task].metric if results else "accuracy"
    accuracies = [result.accuracy for result in results if result.accuracy is not None]
    mean = f", mean {metric} {sum(accuracies) / len(accuracies):.3f}" if accuracies else ""
    lines = [f"done: {sum(outcome.error is None for outcome in outcomes)} of {len(outcomes)} devices have their model{mean}"]
    findings = {one.name: shown_verdict(msgspec.structs.asdict(one.result)) if one.result else None for one in outcomes}
    count = Counter(finding for finding in findings.values() if finding is not None)
    if count:
        said = (f"{finding} {count[finding]}" for finding in get_args(Verdict) if count[finding])
        lines.append(f"what they keep against the other models, on the same test samples: {', '.join(said)}")
    alone = [result.accuracy_alone for result in results if result.accuracy_alone is not None]
    lines += [f"{RIVAL_WORDS['alone']}: mean {metric} {sum(alone) / len(alone):.3f}"] if alone else []
    lines += _no_better(results, metric)
    for outcome in outcomes:
        accuracy, kept = (outcome.result.accuracy, outcome.result.choice) if outcome.result else (None, "-")
        text = "-" if accuracy is None else f"{accuracy:.3f}"
        finding = findings[outcome.name] or "-"
        lines.append(f"{outcome.name:<{width}}  {text:>5}  {kept:<12}  {finding:<7}  {outcome.path or 'failed'}")
    return lines


def _no_better(results: Sequence[OrderResult], metric: str) -> Iterator[str]:
    """Yield what constant answers reach, and on how many devices the model is no better."""
    constant = [result.accuracy_constant for result in results if result.accuracy_constant is not None]
    if constant:
        beaten = sum(result.no_better_than_constant for result in results)
        said = f", and on {beaten} of {len(results)} devices the model is no better" if beaten else ""
        yield f"a constant answer: mean {metric} {sum(constant) / len(constant):.3f}{said}"


def failures(outcomes: Sequence[DeviceOutcome]) -> list[str]:
    """Return the devices that failed, with the reasons. Devices with the same reason share a line."""
    return agreeing((outcome.name, _text(outcome.error)) for outcome in outcomes if outcome.error is not None)


def exit_code(outcomes: Sequence[DeviceOutcome]) -> int:
    """Return 0 if all devices succeeded, else the exit code of the first that failed."""
    for outcome in outcomes:
        if outcome.error is not None:
            return outcome.error.exit_code if isinstance(outcome.error, AttuneError) else AttuneError.exit_code
    return 0


def join(members: Sequence[DeviceOptions], say: Callable[[str], None]) -> None:
    """Enrol the device of each shard, so that the fleet needs no token later. Errors are those of the first refused device."""
    from attune.fedclient.client import identity_of

    for options in members:
        assert options.home is not None  # noqa: S101 (members() gave every device one)
        home = DeviceHome(options.home)
        with home.locked():
            aio.run(identity_of(options, home, partial(_labelled, say, options.label)))


def _labelled(say: Callable[[str], None], label: str | None, text: str) -> None:
    say(f"{label}: {text}")
