"""Real processes of `fedserver` and `fedclient` that do not import torch each: all are forked by tests/zygote.py."""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import pytest

from tests.zygote import live_forked, preload

ROOT = Path(__file__).resolve().parents[1]
ENTRIES = {"fedserver": "attune.fedserver.cli:main", "fedclient": "attune.fedclient.cli:main"}
NARROW = 256
STARTED_S = 120.0  # longest time of the imports on a busy machine
# Servers do not take a GPU: bits are compared with those of a simulation, which computes on the CPU.
STEADY = {
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "GRPC_VERBOSITY": "NONE",
}  # fmt: skip

# Variables that choose the kernels. They are read when torch is imported, so the process that forks must have them.
KERNELS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")


class Zygote:
    """Process that forks the others.

    Args:
        pid: Its process id.
        control: Our end of its socket.
    """

    def __init__(self, pid: int, control: socket.socket) -> None:
        self._pid, self._control, self._lock = pid, control, threading.Lock()
        self._answer()
        atexit.register(self.close)

    def fork(self, entry: str, words: Sequence[str], environment: Mapping[str, str], folder: Path, fds: Sequence[int]) -> int:
        """Fork a process, and return its id.

        Args:
            entry: `module:function`, which it runs.
            words: Command line.
            environment: Environment variables.
            folder: Working folder.
            fds: Descriptors of its input, output and errors, and the one for its exit status.
        """
        command = {"entry": entry, "words": list(words), "environment": dict(environment), "folder": str(folder)}
        with self._lock:
            socket.send_fds(self._control, [json.dumps(command).encode()], list(fds))
            return int(self._answer())

    def _answer(self) -> str:
        if not select.select([self._control], [], [], STARTED_S)[0]:
            raise RuntimeError("the zygote does not answer")
        if not (said := self._control.recv(100)):
            raise RuntimeError("the zygote has ended")
        return said.decode()

    def close(self) -> None:
        """End it, and every process that it started."""
        self._control.close()
        os.waitpid(self._pid, 0)


_ZYGOTES: dict[tuple[tuple[str, str], ...], Zygote] = {}


def zygote(kernels: tuple[tuple[str, str], ...]) -> Zygote:
    """Return this process's zygote for these settings of KERNELS; it ends with this process."""
    if kernels not in _ZYGOTES:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | STEADY | dict(kernels) | {"PYTHONPATH": f"{ROOT / '.package'}:{ROOT}"}
        command = [sys.executable, "-m", "tests.zygote", str(theirs.fileno())]
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], start_new_session=True
        )
        popen.returncode = 0  # it is waited for by its id
        theirs.close()
        _ZYGOTES[kernels] = Zygote(popen.pid, ours)
    return _ZYGOTES[kernels]


def fork_zygote() -> None:
    """Fork the usual zygote from this process, which saves its imports. This process must have no threads that hold locks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in STEADY.items():
            patch.setenv(name, value)
        preload()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest-xdist has a thread that reads from a pipe
        pid = os.fork()
    if not pid:
        live_forked(theirs)
    theirs.close()
    _ZYGOTES[()] = Zygote(pid, ours)


class Forked:
    """A running process, with those methods of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        words: Sequence[str],
        out: IO[bytes],
        err: IO[bytes],
        environment: Mapping[str, str] | None = None,
        entry: str | None = None,
        folder: Path | None = None,
        reads: int | None = None,
    ) -> None:
        """Fork a process.

        Args:
            words: Command line. Without `entry`, its first word is the path of an installed command.
            out: File for its output.
            err: File for its errors.
            environment: Environment variables.
            entry: `module:function` that it runs.
            folder: Working folder.
            reads: Descriptor of its standard input, if it has one.
        """
        if entry is None:
            assert Path(words[0]).is_file(), f"{words[0]} is not installed"
            entry = ENTRIES[Path(words[0]).name]
        environment = os.environ if environment is None else environment
        kernels = tuple((name, environment[name]) for name in KERNELS if name in environment)
        status, theirs = os.pipe()
        self._status, self._reading = os.fdopen(status, "rb"), threading.Lock()
        try:
            with Path(os.devnull).open("rb") as nothing:
                fds = [nothing.fileno() if reads is None else reads, out.fileno(), err.fileno(), theirs]
                self.pid = zygote(kernels).fork(entry, words, environment, folder or Path.cwd(), fds)
        finally:
            os.close(theirs)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or minus the number of the signal that ended it, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Several threads may wait.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            with self._reading:
                if self.returncode is None:
                    self.returncode = int(self._status.read())
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(words: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return what it printed.

    Raises:
        subprocess.TimeoutExpired: It runs too long.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Forked(words, out, err, environment)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode())
        return subprocess.CompletedProcess(list(words), code, *said)


class Popen(Forked):
    """Replacement of `subprocess.Popen` as this repository's programs call it: one pipe, or a file, for all output."""

    def __init__(self, command: Sequence[str], stdout: Any, env: Any = None, cwd: Any = None, **_: Any) -> None:
        if stdout is not subprocess.PIPE:
            super().__init__(command, stdout, stdout, env, folder=cwd)
            return
        ours, theirs = os.pipe()
        self.stdout = os.fdopen(ours, encoding="utf-8")
        with os.fdopen(theirs, "wb") as out:
            super().__init__(command, out, out, env, folder=cwd)


def narrow_server() -> None:
    """Live as a server that may have NARROW descriptors."""
    import resource

    from attune.fedserver.cli import main

    resource.setrlimit(resource.RLIMIT_NOFILE, (NARROW, NARROW))
    main()


def hasty_server() -> None:
    """Live as a server that waits two seconds for a peer to take a message."""
    from attune.fedserver.cli import main
    from attune.fedserver.rpc import auth

    auth.STALLED_S = 2.0
    main()


def holds_learners() -> None:
    """Live as a forked process of executor "processes"."""
    from attune.fedclient.work.processes.hosted import main

    main(0)


@contextlib.contextmanager
def hosts() -> Iterator[None]:
    """Make executor "processes" fork its processes during the block."""
    from attune.fedclient.work.processes import pipe

    def popen(command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], **_: Any) -> Forked:
        return Forked(
            command, sys.__stdout__.buffer, sys.__stderr__.buffer, env, "tests.forked:holds_learners", ROOT, *pass_fds
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipe, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))
        yield


@contextlib.contextmanager
def instead_of_subprocess(*modules: ModuleType) -> Iterator[None]:
    """Make programs fork our commands instead of starting them, during the block."""

    def popen(command: Sequence[str], **options: Any) -> Any:
        ours = Path(command[0]).name in ENTRIES
        return Popen(command, **options) if ours else subprocess.Popen(command, **options)

    def to_the_end(command: Sequence[str], env: Any = None, timeout: float = 120.0, check: bool = False, **_: Any) -> Any:
        done = run(command, os.environ if env is None else env, timeout)
        if check:
            done.check_returncode()
        return done

    with pytest.MonkeyPatch.context() as patch:
        forking = SimpleNamespace(**vars(subprocess) | {"Popen": popen, "run": to_the_end})
        for module in modules:
            patch.setattr(module, "subprocess", forking)
        yield
