"""A Ray cluster of this machine as an operator starts one, with a port for clients. All its processes end with it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from random import SystemRandom

from tests.e2e.harness import until


class Head:
    """Cluster started by `ray start --head` with this number of processors."""

    def __init__(self, folder: Path, cpus: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port, client = free_port(), free_port()
        self.address = f"ray://127.0.0.1:{client}"
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={self.port}"]
        command += [f"--num-cpus={cpus}", f"--ray-client-server-port={client}", "--include-dashboard=false"]
        environment = os.environ | {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        with (folder / "ray.log").open("wb") as log:
            self.popen = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        until(lambda: listens(client) or self.popen.poll() is not None, "Ray's port for clients")
        assert self.popen.poll() is None, (folder / "ray.log").read_text()

    def stop(self) -> None:
        """Stop all its processes with kill -9."""
        for pid in [*descendants(self.popen.pid), self.popen.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.popen.wait()


def descendants(pid: int) -> list[int]:
    """Return the processes below one, from /proc."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    below = parents.get(pid, [])
    return below + [each for child in below for each in descendants(child)]


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a free port outside of the system's dynamic ports, from which Ray's own processes take many."""
    draw = SystemRandom()
    return next(port for port in iter(lambda: draw.randrange(20_000, 30_000), None) if not listens(port))
