"""One small federation of real processes below one folder for chaos: it is started, watched, restarted and inspected."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from typing_extensions import Self

from attune.common import faults
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.blobs import Damaged, blob_of
from attune.fedserver.ports.ledger import Snapshot
from benchmarks.rough import Proxy
from tests.e2e.harness import tabular_shard
from tests.forked import ENTRIES, STEADY, Forked

LOOK_S = 0.02
GONE_S = 10.0  # longest time until the processes of a run are gone after SIGKILL
BY_THE_CLOCK = ("seconds", "bytes_down")  # metrics that faults change: a killed device downloads again
SERVER, DEVICE, JUMPING = ENTRIES["fedserver"], ENTRIES["fedclient"], "tests.chaos.jumping:main"


class Red(Exception):
    """Failure of a run."""


@dataclass(frozen=True)
class Shape:
    """All properties of a federation that decide its bits.

    Attributes:
        settings: As for --set.
        hosted: Whether all devices are in one process.
    """

    name: str
    devices: int
    settings: tuple[str, ...]
    hosted: bool = False

    @property
    def shards(self) -> list[str]:
        return [f"s{number}" for number in range(1, self.devices + 1)]


@dataclass(frozen=True)
class Outcome:
    """Outcome of a federation: digests of the server's slots and of the devices' models, and the devices' reports."""

    slots: dict[str, str]
    models: dict[str, str]
    rows: dict[str, dict[str, Any]]

    def differences(self, other: Outcome) -> list[str]:
        lines = []
        for what in ("slots", "models", "rows"):
            one, two = getattr(self, what), getattr(other, what)
            differing = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
            if differing:
                lines.append(f"{what} differ: {', '.join(differing)}")
        return lines


class Child:
    """Forked server, device or fleet. `what` is its name, by which it is started again."""

    def __init__(self, what: str, process: Forked, log: Path) -> None:
        self.what, self.log = what, log
        self._process = process

    def __str__(self) -> str:
        return f"{self.what} (exit {self.exit}):\n{self.text[-3000:]}"

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def exit(self) -> int | None:
        """Exit status; below 0 the number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


class Site:
    """The federation. All its processes end when the site is closed."""

    def __init__(self, folder: Path, shape: Shape, patience_s: float) -> None:
        self.folder, self.shape = folder, shape
        self._deadline = time.monotonic() + patience_s
        self._patience_s = patience_s
        folder.mkdir(parents=True)
        for number, shard in enumerate(shape.shards):
            tabular_shard(folder / "shards" / shard, number)
        self.server_home, self.devices_home = folder / "server", folder / "devices"
        self.port = 0
        self.proxy: Proxy | None = None
        self.clock_jumps = False
        self.addresses = ""  # those that devices know, if there are several servers
        self.server_words: Sequence[str] = ()  # options of the server beside those of every site
        self.device_words: Sequence[str] = ()  # options of devices beside those of every site
        self.children: dict[str, Child] = {}  # the processes that were started last
        self.logs: list[Path] = []
        self.accepted: set[str] = set()  # orders whose updates were in the inbox while the server was down
        self.token = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill_all()
        if self.proxy is not None:
            self.proxy.close()

    def kill_all(self) -> None:
        """Kill all processes, and wait until they are gone."""
        for child in self.children.values():
            child.signal(signal.SIGKILL)
        deadline = time.monotonic() + GONE_S
        while any(child.exit is None for child in self.children.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)

    # --- starting

    @property
    def groups(self) -> list[str]:
        """Names of the processes of devices: shards, or the one fleet."""
        return ["fleet"] if self.shape.hosted else self.shape.shards

    @property
    def assignments(self) -> list[str]:
        return [*self.shape.settings, f"round.min_clients={self.shape.devices}"]

    def words_of(self, home: Path, port: int) -> list[str]:
        """Return the command line of a server."""
        words = ["fedserver", "--home", str(home), "--host", "127.0.0.1", "--port", str(port), "--join-uses", "100"]
        return [*words, *self.server_words, *(word for each in self.assignments for word in ("--set", each))]

    def start_server(self, fault: str = "") -> Child:
        """Start the server, and wait until it listens; a fault may end it before.

        Raises:
            Red: It does not listen.
        """
        if self.clock_jumps:
            entry, words = JUMPING, ["jumping-server", str(self.server_home), str(self.port), *self.assignments]
        else:
            entry, words = SERVER, self.words_of(self.server_home, self.port)
        child = self._fork("server", entry, words, fault)

        def listens() -> bool:
            found = re.search(r"listens on \S+:(\d+) ", child.text)
            if found:
                self.port = int(found[1])
                token = re.search(r"--token (\S+)", child.text)
                self.token = token[1] if token else self.token
            return bool(found and self.token) or child.exit is not None

        self.until(listens, "the server to listen")
        return child

    def start_device(self, group: str, fault: str = "") -> Child:
        port = self.proxy.port if self.proxy else self.port
        words = ["fedclient", "--server", self.addresses or f"localhost:{port}", "--token", self.token, "--device", "cpu"]
        if group.startswith("fleet"):
            members = self.shape.shards
            if group != "fleet":  # one of several: every fifth device is in it
                number, of = (int(part) for part in group.removeprefix("fleet").split("of"))
                members = members[number::of]
            words += ["--home", str(self.devices_home), "--name", "edge"]
            words += [word for shard in members for word in ("--data", str(self.folder / "shards" / shard))]
        else:
            words += ["--home", str(self.devices_home / group), "--name", f"edge-{group}"]
            words += ["--data", str(self.folder / "shards" / group)]
        return self._fork(group, DEVICE, [*words, *self.device_words], fault)

    def _fork(self, what: str, entry: str, words: Sequence[str], fault: str) -> Child:
        log = self.folder / f"{len(self.logs):02}-{what}.log"
        self.logs.append(log)
        environment = os.environ | STEADY | {"ATTUNE_HOME": str(self.folder / "attune"), faults.VARIABLE: fault}
        with log.open("ab") as out:
            child = Child(what, Forked(words, out, out, environment, entry), log)
        self.children[what] = child
        return child

    # --- watching

    @property
    def server(self) -> Child:
        return self.children["server"]

    def until(self, happened: Callable[[], Any], what: str) -> None:
        """Wait until something has happened.

        Raises:
            Red: The run's time is over.
        """
        while not happened():
            self.check_time(what)
            time.sleep(LOOK_S)

    def check_time(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            running = [name for name, child in self.children.items() if child.exit is None]
            raise Red(f"hung: waited in vain for {what}; {self._patience_s:.0f} s are over; running: {running}")

    def note_inbox(self) -> None:
        """Remember the accepted updates, while no server runs."""
        self.accepted |= {path.parent.name for path in (self.server_home / "inbox").glob("*/update.json")}

    def stop_server(self) -> None:
        """Stop the server.

        Raises:
            Red: Its exit status is not 0.
        """
        self.server.signal(signal.SIGTERM)
        self.until(lambda: self.server.exit is not None, "the server to stop")
        if self.server.exit != 0:
            raise Red(f"the server ended with {self.server.exit} when it was told to stop")

    def tracebacks(self) -> list[str]:
        """Return the logs that contain a traceback."""
        words = ("Traceback", "Task was destroyed", "never retrieved", "never awaited", "Exception ignored")
        return [
            log.name for log in self.logs if log.exists() and any(word in log.read_text(errors="replace") for word in words)
        ]

    # --- what is left

    def snapshot(self) -> Snapshot:
        return ServerHome(self.server_home).snapshot()

    def outcome(self) -> Outcome:
        """Return the outcome of a site whose processes have ended.

        Raises:
            Red: A slot's file is not the one of the ledger, or an update was lost.
        """
        found = self.snapshot()
        rows = {f"{row.work}-{row.round}-{row.client}": msgspec.structs.asdict(row) for row in found.rows}
        lost = sorted(self.accepted - rows.keys())
        if lost:
            raise Red(f"lost: accepted, and no row: {', '.join(lost)}")
        slots = {f"{slot.part} {slot.key}": f"{slot.digest} {slot.file}" for slot in found.slots}
        blobs = ServerHome(self.server_home).open().blobs
        for slot in found.slots:
            try:
                blobs.check(blob_of(slot))
            except Damaged as damaged:
                raise Red(f"{slot.file} is not what the ledger says") from damaged
        models = {
            shard: hashlib.sha256((self.devices_home / shard / "model" / "model.safetensors").read_bytes()).hexdigest()
            for shard in self.shape.shards
        }
        kept = {name: {key: row[key] for key in row if key not in BY_THE_CLOCK} for name, row in rows.items()}
        return Outcome(slots, models, kept)

    def remove(self) -> None:
        """Remove the folder after all processes have ended; a running one would write into the folder of the next try."""
        self.kill_all()
        shutil.rmtree(self.folder, ignore_errors=True)
