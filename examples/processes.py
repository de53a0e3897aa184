"""One federation of the demo in real processes: a server, and a process that hosts a device for each shard."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click

PREFIX = "demo"  # prefix of every device's name. Random draws depend on names, so it may not be the host's name
LISTENS = re.compile(r"listens on \S+:(\d+)")
CLOSED = re.compile(r"round (\d+)/(\d+) closed: (.*)")
SHOWN_EVERY = 5  # rounds

Tell = Callable[[int, int, str], None]  # number of the closed round, number of rounds, and the rest of the server's line


class Watch:
    """Progress display: what is done, and how long the rest will take at the speed since the first round was closed."""

    def __init__(self, work: float) -> None:
        self._left, self._done = work, 0.0
        self._since: float | None = None  # monotonic; starting processes takes long, and only once for each federation

    def of(self, method: str, work: float) -> Tell:
        """Return a function to be called after each round of this method, which is `work` of the whole."""

        def tell(number: int, rounds: int, said: str) -> None:
            self._left -= work
            if self._since is None:
                self._since, left = time.monotonic(), ""
            else:
                self._done += work
                left = f"; about {(time.monotonic() - self._since) / self._done * self._left:.0f} s left"
            if number % SHOWN_EVERY == 0 or number in (1, rounds):
                click.echo(f"[{method}] round {number}/{rounds}: {said}{left}")

        return tell


class Federation:
    """Processes, logs and homes below one folder."""

    def __init__(self, folder: Path, method: str, shards: Sequence[Path], tell: Tell) -> None:
        self._folder, self._method, self._shards, self._tell = folder, method, shards, tell
        self._server = folder / "server"

    @staticmethod
    def bin() -> Path:
        """Return the folder of the commands, as a short path if possible."""
        folder = Path(sys.executable).parent
        return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder

    def to_the_end(self, rounds: int, seed: int, settings: Iterable[str], more: Iterable[str] = ()) -> None:
        """Run until every device has its model. `more` has flags of the devices.

        Raises:
            click.ClickException: A process has failed.
        """
        self._folder.mkdir(parents=True)
        flags = ["--home", self._server, "--host", "127.0.0.1", "--port", 0, "--method", self._method, "--rounds", rounds]
        flags += ["--min-clients", len(self._shards), "--seed", seed, "--exit-when-done"]
        server = self._start(
            "fedserver", [*flags, *(word for setting in settings for word in ("--set", setting))], subprocess.PIPE
        )
        fleet = None
        try:
            port = self._port(server)
            token = (self._server / "local-token").read_text().strip()
            data = [word for shard in self._shards for word in ("--data", shard)]
            to = ["--server", f"localhost:{port}", "--token", token, "--home", self._folder / "devices", "--name", PREFIX]
            to += ["--disclose", "statistics"]  # all devices are of one person
            to += ["--executor", "stacked"]  # the devices' small models train together: half of the time
            with (self._folder / "devices.log").open("w", encoding="utf-8") as log:
                fleet = self._start("fedclient", [*data, *to, *more], log)
            self._wait({"the devices": fleet, "fedserver": server})
        finally:
            for process in filter(None, (fleet, server)):
                if process.poll() is None:
                    process.terminate()
                    process.wait(10)

    def status(self) -> dict[str, Any]:
        """Return what `fedserver status --json` says."""
        command = [str(Path(sys.executable).parent / "fedserver"), "status", "--json", "--home", str(self._server)]
        status: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return status

    def clients(self) -> dict[str, dict[str, Any]]:
        """Return for each shard what `fedserver status --json` says of its device.

        Raises:
            click.ClickException: A device has no accuracy.
        """
        clients = {client["name"].removeprefix(f"{PREFIX}-"): client for client in self.status()["clients"]}
        if missing := [shard.name for shard in self._shards if clients.get(shard.name, {}).get("accuracy") is None]:
            raise click.ClickException(f"{self._method}: {', '.join(missing)} ended without an accuracy")
        return clients

    def home(self, shard: Path) -> Path:
        """Return the home of a shard's device.

        Raises:
            click.ClickException: The device has no model.
        """
        home = self._folder / "devices" / shard.name
        if not (home / "model").is_dir():
            raise click.ClickException(
                f"{self._method}: {shard.name} ended without a model; see {self._folder / 'devices.log'}"
            )
        return home

    def _start(self, command: str, words: Sequence[object], out: Any) -> subprocess.Popen[str]:
        line = [str(Path(sys.executable).parent / command), *map(str, words)]
        return subprocess.Popen(line, stdout=out, stderr=subprocess.STDOUT, text=True)

    def _port(self, server: subprocess.Popen[str]) -> int:
        """Read the port from the server's first line. From then on a thread follows its rounds."""
        said = ""
        lines = iter(server.stdout or ())
        for line in lines:
            said += line
            if match := LISTENS.search(line):
                threading.Thread(target=self._follow, args=(lines,), daemon=True).start()
                return int(match[1])
        raise click.ClickException(f"{self._method}: fedserver did not start: {said.strip()}")

    def _follow(self, lines: Iterable[str]) -> None:
        with (self._folder / "server.log").open("w", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                if match := CLOSED.search(line):
                    self._tell(int(match[1]), int(match[2]), match[3].strip())

    def _wait(self, running: dict[str, subprocess.Popen[str]]) -> None:
        """Wait until all have ended well. If one fails, end the demo at once, since the others would wait for it."""
        while any(process.poll() is None for process in running.values()):
            time.sleep(0.1)
            self._check(running)
        self._check(running)

    def _check(self, running: dict[str, subprocess.Popen[str]]) -> None:
        for name, process in running.items():
            if process.poll():
                raise click.ClickException(f"{self._method}: {name} ended with status {process.returncode}; see {self._folder}")
