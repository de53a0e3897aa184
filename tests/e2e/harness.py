"""Real processes for tests: servers and devices of one federation below one folder, which all end with it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attune.common import faults
from attune.common.metrics import METRICS
from attune.fedserver.home import ServerHome
from attune.fedserver.view.export import ORDER_COLUMNS, export_home
from attune.fedserver.view.homes import status_of
from attune.simulation.partition.datasets import load_dataset
from attune.simulation.partition.split import Partition, partition, write_shards
from tests.forked import ROOT, STEADY, Forked, run
from tests.homes.kept import DEVICES, SERVER, unlisted

IN_TRAINING = "*:*:training=hang"  # fault of a device: it hangs in its first batch
IN_COMPARISON = "*:*:compared=hang"  # it hangs when it has compared its models, and has answered nothing
IN_AGGREGATION = "server:*:aggregated=hang"  # fault of the server: it hangs when all is staged and nothing is committed
# Runs fedclient as an installation without these packages.
WITHOUT_TORCH = (
    "import sys; sys.modules.update(dict.fromkeys(('torch', 'sklearn', 'scipy', 'joblib', 'threadpoolctl')));"
    "from attune.fedclient.cli import main; sys.argv[0] = 'fedclient'; main()"
)
PATIENCE_S = 120.0  # longest time for any event; a quiet machine needs a few seconds


def until(happened: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Call `happened` again and again, and return its first true value."""
    deadline, pause_s = time.monotonic() + patience_s, 0.02
    while not (value := happened()):
        assert time.monotonic() < deadline, f"in vain for {patience_s:.0f} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.1 * pause_s, 0.25)
    return value


class Process:
    """Running command whose output goes to a file.

    Args:
        fresh: Whether it gets an interpreter of its own, as when users start it. Otherwise it is a fork of a process that has
            imported everything, which saves two to four seconds of processor time.
        entry: `module:function` that the fork runs instead of the command.
    """

    def __init__(
        self, command: Sequence[str], log: Path, environment: dict[str, str], fresh: bool = False, entry: str | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self.popen: subprocess.Popen[bytes] | Forked = (
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
                if fresh
                else Forked(command, out, out, environment, entry)
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until a line of the output matches."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.text, re.MULTILINE)
            assert found or self.popen.poll() is None, f"ended ({self.popen.poll()}) without {pattern!r}:\n{self.text}"
            return found

        found: re.Match[str] = until(look, f"{pattern!r} in {self.log}:\n{self.text}")
        return found

    def await_fault(self) -> None:
        self.wait_for("^fault: ")

    def code(self) -> int:
        """Wait for the end, and return the exit status."""
        try:
            return self.popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE_S:.0f} s:\n{self.text}") from None

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process with kill -9."""
        self.signal(signal.SIGKILL)
        assert self.code() == -signal.SIGKILL

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        self.signal(signal.SIGTERM)
        return self.code()


class Server(Process):
    """fedserver that listens."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: dict[str, str],
        home: Path,
        fresh: bool = False,
        entry: str | None = None,
    ) -> None:
        super().__init__(command, log, environment, fresh, entry)
        self.home = home
        self.port = int(self.wait_for(r"listens on \S+:(\d+) ")[1])
        self.join_token = self.wait_for(r"join --server \S+ --token (\S+)")[1]


class Federation:
    """Processes of one federation. Its server has the default home, so devices find a token there by themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.home = folder / "attune" / "server"
        self.environment = os.environ | STEADY | {"ATTUNE_HOME": str(folder / "attune")}
        self.processes: list[Process] = []
        self.port = 0
        self._started = 0

    def server(self, *flags: str, fault: str = "", entry: str | None = None, words: Sequence[str] = ()) -> Server:
        """Start a server, or start it again on the port of the first one.

        Args:
            flags: Words of the command line.
            words: Command that serves, such as `evaluate`.
            fault: A fault (common/faults.py).
            entry: `module:function` that runs instead of the command.
        """
        command = [_script("fedserver"), *words, "--host", "127.0.0.1", "--port", str(self.port), "--join-uses", "100", *flags]
        if "--dashboard" not in flags:
            command += ["--dashboard", "off"]
        server = Server(command, self._log("server"), self._with(fault), self.home, entry=entry)
        self.port = server.port
        self.processes.append(server)
        return server

    def device(self, shard: Path, *flags: str, name: str | None = None, fault: str = "") -> Process:
        """Start the device of a shard, or start it again. For `fault`, see common/faults.py."""
        name = name or shard.name
        command = [_script("fedclient"), "--data", str(shard), "--device", "cpu"]
        command += ["--server", f"localhost:{self.port}", "--name", name, *flags]
        process = Process(command, self._log(name), self._with(fault))
        self.processes.append(process)
        return process

    def light(self, shard: Path, *flags: str, fault: str = "") -> Process:
        """Start the light device of a shard, whose interpreter has neither torch nor scikit-learn."""
        command = [sys.executable, "-c", WITHOUT_TORCH, "--data", str(shard), "--server", f"localhost:{self.port}"]
        command += ["--name", shard.name, "--disclose", "statistics", "--disclose", "sums", *flags]
        environment = self._with(fault) | {"PYTHONPATH": f"{ROOT / '.package'}:{ROOT}"}
        process = Process(command, self._log(shard.name), environment, fresh=True)
        self.processes.append(process)
        return process

    def devices(self, shards: Sequence[Path], *flags: str) -> list[Process]:
        return [self.device(shard, *flags) for shard in shards]

    def fleet(self, shards: Sequence[Path], *flags: str) -> Process:
        """Start one process with a device for each shard."""
        data = [word for shard in shards for word in ("--data", str(shard))]
        command = [_script("fedclient"), *data, "--device", "cpu", "--server", f"localhost:{self.port}", *flags]
        process = Process(command, self._log("fleet"), self.environment)
        self.processes.append(process)
        return process

    def command(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run `fedserver ...` or `fedclient ...` to its end, and check its exit status."""
        done = run([_script(words[0]), *words[1:]], self.environment, PATIENCE_S)
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    def status(self) -> dict[str, Any]:
        """Return the output of `fedserver status --json`, computed in this process to save a second each time."""
        return status_of(ServerHome(self.home))

    def client(self, name: str) -> dict[str, Any]:
        """Return one device's entry in the status."""
        return next((entry for entry in self.status()["clients"] if entry["name"] == name), {})

    def await_status(self, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Wait for a status with a property, and return it."""
        seen: dict[str, Any] = {}

        def look() -> bool:
            seen.update(self.status())
            return bool(wanted(seen))

        until(look, f"the status to be as wanted, in {self.folder}")
        return seen

    def model(self, shard: Path) -> Path:
        """Return the folder of a device's finished model."""
        [found] = self.folder.glob(f"attune/devices/localhost_{self.port}/{shard.name}-*/model")
        return found

    def export(self, allowed: Sequence[str] = ()) -> dict[str, bytes]:
        """Return the files that `fedserver export` writes, by relative path. `allowed` has the home's own code."""
        out = self.folder / f"export{self._started}"
        self._started += 1
        export_home(ServerHome(self.home), out, allowed)
        return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}

    def metrics(self) -> list[dict[str, str]]:
        """Return the rows of metrics.csv."""
        rows = [msgspec.structs.asdict(row) for row in ServerHome(self.home).snapshot().rows]
        return [{name: "" if row[name] is None else str(row[name]) for name in (*ORDER_COLUMNS, *METRICS)} for row in rows]

    def inbox(self) -> set[str]:
        """Return the order ids of accepted updates that wait for the end of their round."""
        return {path.name for path in (self.home / "inbox").glob("*") if not path.name.startswith(".")}

    def close(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()
        strange = unlisted(self.home, SERVER)
        for described in self.folder.glob("attune/devices/**/device.json"):
            strange += unlisted(described.parent, DEVICES)
        assert not strange, f"give a version to {strange}, or a reason for none in tests/homes/kept.py"

    def _with(self, fault: str) -> dict[str, str]:
        return self.environment | {faults.VARIABLE: fault}

    def _log(self, name: str) -> Path:
        self._started += 1
        return self.folder / f"{self._started:02}-{name}.log"


FederationAt = Callable[[str], Federation]  # what the fixture `federation_at` returns: it takes a name


def run_to_the_end(
    federation: Federation, shards: Sequence[Path], *flags: str, device_flags: Sequence[str] = ()
) -> tuple[Server, list[Process]]:
    """Run a server that exits when done, and a device for each shard, until all have ended well."""
    minimum = ("--min-clients", str(len(shards)))
    server = federation.server("--exit-when-done", *minimum, *flags)
    devices = federation.devices(shards, *device_flags)
    codes = [process.code() for process in (*devices, server)]
    assert not any(codes), "\n".join(process.text for process in (*devices, server))
    return server, devices


def digit_shards(folder: Path, clients: int, samples: int | None = None, test_samples: int | None = None) -> list[Path]:
    """Write the first shards of five with two digits each, with this number of samples."""
    cut = partition(load_dataset("digits"), "pathological", 5, classes_per_client=2)
    train, test = (
        [part[:limit] for part in parts[:clients]] for parts, limit in ((cut.train, samples), (cut.test, test_samples))
    )
    return write_shards(folder, Partition(cut.dataset, cut.title, cut.names[:clients], tuple(train), tuple(test)))


def tabular_shard(folder: Path, seed: int, samples: int = 40, features: int = 6, classes: Sequence[int] = (0, 1, 2)) -> Path:
    """Write Gaussian clouds, one for each class. `classes` are those that may occur in the federation."""
    rng = np.random.default_rng(seed)
    y = rng.choice(np.array(classes), size=samples + 20)
    x = (np.random.default_rng(0).normal(size=(10, features))[y] * 3 + rng.normal(size=(samples + 20, features))).astype("f4")
    folder.mkdir(parents=True)
    np.savez(folder / "train.npz", x=x[:samples], y=y[:samples])
    np.savez(folder / "test.npz", x=x[samples:], y=y[samples:])
    (folder / "meta.json").write_bytes(msgspec.json.encode({"classes": sorted({0, 1, 2, *classes})}))
    return folder


def _script(name: str) -> str:
    return str(Path(sys.executable).with_name(name))
