"""A process that has imported everything once and forks servers and devices quickly; each child is a process of its own.

It reads commands from a socket, answers with the child's process id, and writes a child's exit status to a pipe. At the end of
the socket it kills all running children. It is run as a program, or forked from a process of pytest-xdist, which needs these
imports itself. tests/forked.py talks to it.
"""

import faulthandler
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any

LOOK_S = 0.02  # seconds between checks for ended children
LONGEST = 1 << 18  # most bytes of a request


def preload() -> None:
    import grpc.aio  # noqa: F401
    import torch

    with suppress(ImportError):
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    with suppress(ImportError):
        import sklearn.datasets  # noqa: F401  # whoever cuts the digits needs it

    from attune.common.methods.registry import get
    from attune.fedclient import cli, client, fleet, options  # noqa: F401
    from attune.fedclient.model import artifact  # noqa: F401
    from attune.fedclient.work import learner  # noqa: F401
    from attune.fedclient.work.portfolio import fitting
    from attune.fedserver import app as server_app  # noqa: F401
    from attune.fedserver import cli as server_cli  # noqa: F401
    from attune.fedserver.core import training_length
    from attune.fedserver.lab import engine, recovery  # noqa: F401

    for name in ("fedavg", "fedmcsa", "fedper", "pfedhn"):
        get(name)
    options.DEFAULT_BASELINE, fitting.TREES, training_length.MOST_USUAL_EPOCHS = "none", 20, 5  # as in tests/conftest.py
    torch.optim.SGD([torch.zeros(1)])  # the first optimiser of a process imports half of torch


def serve(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork until the socket ends (then return None). In a child, return its command, and its descriptors 0, 1 and 2."""
    running: dict[int, int] = {}  # descriptors for the exit status of each child
    while True:
        _reap(running)
        if not select.select([control], [], [], LOOK_S if running else None)[0]:
            continue
        data, fds, _, _ = socket.recv_fds(control, LONGEST, 4)
        if not data:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            while running:
                _reap(running, 0)
            return None
        *standard, status = fds
        pid = os.fork()
        if not pid:
            control.close()
            for fd in (status, *running.values()):
                os.close(fd)
            return json.loads(data), standard
        for fd in standard:
            os.close(fd)
        running[pid] = status
        control.send(str(pid).encode())


def _reap(running: dict[int, int], options: int = os.WNOHANG) -> None:
    """Report how children ended."""
    while running:
        pid, status = os.waitpid(-1, options)
        if not pid:
            return
        with suppress(BrokenPipeError), os.fdopen(running.pop(pid), "wb") as end:  # at the end of all tests nobody reads it
            end.write(str(os.waitstatus_to_exitcode(status)).encode())


def become(command: dict[str, Any], standard: list[int]) -> None:
    """Live as a child."""
    for place, fd in enumerate(standard):
        os.dup2(fd, place)
        os.close(fd)
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(command["folder"])
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in sys.path]
    sys.path[:0] = places  # as a new interpreter would
    sys.argv = command["words"]

    from attune.common import faults

    faults.arm(os.environ.get(faults.VARIABLE, ""))
    module, _, function = command["entry"].partition(":")
    try:
        getattr(import_module(module), function)()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    else:
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]  # a thread that does not end is a fault that shows
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to tear down all imported modules takes seconds on a busy machine


def live(control: socket.socket) -> None:
    """Serve until the socket ends, or become what was asked for."""
    gc.freeze()  # children share the imported objects
    control.send(b"ready")
    if (asked := serve(control)) is not None:
        become(*asked)


def live_forked(control: socket.socket) -> None:
    """Live as a fork of a process of pytest-xdist, without its files, handlers and replaced streams. It never returns."""
    os.setsid()
    faulthandler.disable()
    logging.root.handlers.clear()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    try:
        live(control)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    preload()
    live(channel)
