"""A process that has imported everything once and forks a server or a device in no time; each child is a process of its own.

Reads commands as JSON lines on stdin, answers with the child's process id, and writes a child's exit status beside its log. At
the end of stdin it kills what still runs. Run as a program.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK_S = 0.02  # between looks whether a child has ended
JUMP_S = 3600.0  # how far a jumping clock is set, at most


def preload() -> None:
    import grpc.aio  # noqa: F401
    import torch  # noqa: F401

    from attune.common.methods.registry import get
    from attune.fedclient import app, cli, fleet  # noqa: F401
    from attune.fedclient.model import artifact  # noqa: F401
    from attune.fedclient.work import learner  # noqa: F401
    from attune.fedserver import app as server_app  # noqa: F401
    from attune.fedserver import cli as server_cli  # noqa: F401
    from attune.fedserver.lab import engine, recovery  # noqa: F401

    for name in ("fedavg", "fedmcsa", "fedper", "pfedhn"):
        get(name)


def serve() -> dict[str, Any] | None:
    """Until stdin ends (None); in a child what it is to run."""
    running: dict[int, Path] = {}
    while True:
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            log = running.pop(pid)
            beside = log.with_suffix(".tmp")
            beside.write_text(str(os.waitstatus_to_exitcode(status)))
            beside.replace(log.with_suffix(".exit"))
        if not select.select([sys.stdin], [], [], LOOK_S)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        command: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if not pid:
            return command
        running[pid] = Path(command["log"])
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def become(command: dict[str, Any]) -> None:
    """A child's life."""
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for fd, place in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(fd, place)
    os.environ.update(command["environment"])
    sys.argv = command["words"]

    from attune.common import faults

    faults.arm(os.environ.get(faults.VARIABLE, ""))
    try:
        PROGRAMS[command["words"][0]]()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    else:
        code = 0
    threading._shutdown()  # type: ignore[attr-defined]  # a thread that does not end is a fault that shows
    sys.stdout.flush()
    os._exit(code)  # taking everything apart that was imported takes seconds on a busy machine


def fedserver() -> None:
    from attune.fedserver.cli import main

    main()


def fedclient() -> None:
    from attune.fedclient.cli import main

    main()


def jumping_server() -> None:
    """A fedserver whose time of day jumps by up to an hour, back and forth, each time somebody asks."""
    import logging

    from attune.common.config import load_settings
    from attune.fedserver.app import Options, run
    from attune.fedserver.federation.clock import Clock

    _, home, port, *assignments = sys.argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    jumps = random.Random(0)
    clock = Clock(unix=lambda: time.time() + jumps.uniform(-JUMP_S, JUMP_S))
    overrides = load_settings(None, assignments, {})
    options = Options(Path(home), "127.0.0.1", int(port), False, lambda text: print(text, flush=True), clock, join_uses=100)
    asyncio.run(run(options, overrides))


PROGRAMS: dict[str, Callable[[], None]] = {"fedserver": fedserver, "fedclient": fedclient, "jumping-server": jumping_server}

if __name__ == "__main__":
    preload()
    gc.freeze()  # children share what was imported
    print("ready", flush=True)
    if (asked := serve()) is not None:
        become(asked)
