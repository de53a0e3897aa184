"""A federation in real processes: one fedserver and N fedclients, each with a home of its own."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
START_S = 180.0  # enough for a busy machine
STOP_S = 10.0
LOOK_S = 1.0  # seconds between checks that all processes are alive
LAST_LINES = 15
OnLine = Callable[[int, float, str], None]


class ProcessEnded(RuntimeError):
    """A process of the federation has ended, or printed nothing more, too early."""


@dataclass
class Speaker:
    """Process whose lines get a timestamp (time.monotonic) as they arrive.

    `on_line` (process id, time, line) runs at once, in the reading thread.
    """

    name: str
    process: subprocess.Popen[str]
    on_line: OnLine | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)
    _news: queue.SimpleQueue[tuple[float, str] | None] = field(default_factory=queue.SimpleQueue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            stamped = (time.monotonic(), line.rstrip("\n"))
            if self.on_line is not None:
                self.on_line(self.process.pid, *stamped)
            self.lines.append(stamped)
            self._news.put(stamped)
        self._news.put(None)

    def wait_for(self, pattern: str, timeout_s: float, others: Sequence[Speaker] = ()) -> re.Match[str]:
        """Wait for the first line from here on that matches, and return it.

        Raises:
            ProcessEnded: The process, or one of `others`, has ended first.
        """
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            for other in others:
                if other.process.poll() is not None:
                    raise ProcessEnded(f"{other} ended while {self.name} was to say {pattern!r}")
            try:
                stamped = self._news.get(timeout=min(left, LOOK_S))
            except queue.Empty:
                continue
            if stamped is None:
                break
            if match := re.search(pattern, stamped[1]):
                return match
        raise ProcessEnded(f"{self} did not say {pattern!r} within {timeout_s:.0f} s")

    def __str__(self) -> str:
        said = "".join(f"\n  {line}" for _, line in self.lines[-LAST_LINES:])
        return f"{self.name} (exit status {self.process.poll()}, last lines:{said})"


def environment(home: Path) -> Mapping[str, str]:
    """Return the environment of a process: its state below `home`, and this repository on its path, for the model's code."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return os.environ | {"ATTUNE_HOME": str(home), "PYTHONPATH": path, "GRPC_VERBOSITY": "NONE"}


@contextmanager
def running(name: str, arguments: list[str], home: Path, on_line: OnLine | None = None) -> Iterator[Speaker]:
    """Run a process during the block; then ask it to stop, and kill it if it does not."""
    process = subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=environment(home),
        cwd=home,
    )
    try:
        yield Speaker(name, process, on_line)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def delayed(port: int, rtt_ms: float, home: Path) -> Iterator[int]:
    """Run a proxy to `port` that adds `rtt_ms`, and yield its port. Without a delay, yield `port` itself."""
    if not rtt_ms:
        yield port
        return
    arguments = [sys.executable, "-m", "benchmarks.delay", "--to", str(port), "--rtt-ms", str(rtt_ms)]
    with running("delay", arguments, home) as proxy:
        yield int(proxy.wait_for(r"^(\d+)$", 30).group(1))


def named(shard: Path) -> list[str]:
    """Return the arguments that name a device as its shard; several shards (a pattern) have several devices."""
    return ["--name", shard.name] if shard.exists() else []


@contextmanager
def federation(
    work: Path,
    shards: list[Path],
    server_arguments: list[str],
    client_arguments: list[str],
    rtt_ms: float = 0.0,
    on_line: OnLine | None = None,
    between: Callable[[int], AbstractContextManager[int]] | None = None,
) -> Iterator[tuple[Speaker, list[Speaker]]]:
    """Run the server and one device for each shard, connected, with homes below `work`.

    Args:
        work: Folder of the federation.
        shards: Folders of the shards.
        server_arguments: Arguments of fedserver.
        client_arguments: Arguments of fedclient.
        rtt_ms: Delay of the link.
        on_line: Called for each line of the server.
        between: Makes another link than a delayed one: takes the server's port, and gives the port that devices use.
    """
    with ExitStack() as stack:
        arguments = [str(BIN / "fedserver"), "--port", "0", "--host", "127.0.0.1", "--join-uses", "1000", *server_arguments]
        server = stack.enter_context(running("fedserver", arguments, work, on_line))
        port = int(server.wait_for(r"listens on 127\.0\.0\.1:(\d+)", START_S).group(1))
        token = server.wait_for(r"--token (\S+)", 10).group(1)
        way = stack.enter_context(between(port) if between is not None else delayed(port, rtt_ms, work))
        common = ["--server", f"127.0.0.1:{way}", "--token", token, "--device", "cpu", *client_arguments]
        devices = [
            stack.enter_context(
                running(f"fedclient {shard.name}", [str(BIN / "fedclient"), "--data", str(shard), *named(shard), *common], work)
            )
            for shard in shards
        ]
        yield server, devices
