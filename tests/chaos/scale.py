"""`make chaos-scale`: seeded runs of two servers over PostgreSQL and SeaweedFS, all of which are killed in turn.

Servers are also stopped for a while, or cut off from the database. No run may hang, lose an update or commit twice: the outcome
must be that of an undisturbed run. Each result is appended to the file of results at once, and a seed that is there is not run
again.
"""

import contextlib
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

from attune.common.errors import LedgerBusy, ServerReplaced
from benchmarks.rough import Proxy
from tests import engines
from tests.chaos.site import LOOK_S, Child, Outcome, Red, Shape, Site
from tests.forked import ENTRIES

SHAPE = Shape(
    "fedmcsa", 3,
    ("method.name=fedmcsa", "model.name=mlr", "round.rounds=60", "train.local_steps=3", "server.inline_bytes=0"), hosted=True,
)  # fmt: skip
SETTLED_S, FAULTS, LONGEST_S = 1.5, 4, 6.0  # before the first fault; most faults of a run; longest time of a stopped process
ENDS = (-signal.SIGKILL, ServerReplaced.exit_code, LedgerBusy.exit_code)  # exits after which a supervisor starts a server again


class Servers:
    """Two servers of a site. Each is started again when it has ended."""

    def __init__(self, site: Site) -> None:
        self.site = site
        site.server_words = words = engines.remote_words()
        port = engines.postgres().port
        self.ways = {what: Proxy(port) for what in ("server", "standby")}  # from each server to the database
        self.words = {what: [word.replace(f":{port}/", f":{way.port}/") for word in words] for what, way in self.ways.items()}
        site.server_words = self.words["server"]
        site.start_server()
        self.homes = {"server": site.server_home, "standby": site.folder / "standby"}
        self.ports = {"server": site.port, "standby": engines.free_port()}
        shutil.copytree(site.server_home / "ca", self.homes["standby"] / "ca")
        self.start("standby")
        site.addresses = ",".join(f"localhost:{port}" for port in self.ports.values())

    def start(self, what: str) -> None:
        self.site.server_words = self.words[what]
        self.site._fork(what, ENTRIES["fedserver"], self.site.words_of(self.homes[what], self.ports[what]), "")

    def active(self) -> Child | None:
        """Return the server that has begun to serve last, if it runs."""
        serving = [self.site.children[what] for what in self.homes if "listens on" in self.site.children[what].text]
        alive = [child for child in serving if child.exit is None]
        return alive[-1] if alive else None

    def supervise(self) -> None:
        """Start servers that have ended.

        Raises:
            Red: One has ended by itself.
        """
        for what in self.homes:
            child = self.site.children[what]
            if child.exit is not None:
                if child.exit not in ENDS:
                    raise Red(f"{child}")
                self.start(what)


def cut_the_active(servers: Servers, rng: random.Random) -> str:
    """Cut the active server off from the database: connections are reset and refused, or nothing passes any more."""
    active, stalls = servers.active(), rng.random() < 0.5
    if active is not None:
        way = servers.ways[active.what]
        to = way.to
        if stalls:
            way.silence(math.inf)
        else:
            way.to = engines.free_port()
            way.cut_all()
        pause(servers, rng.uniform(0.5, LONGEST_S))
        way.to = to
        way.silence(0.0)
    return f"active server cut off from the database ({'silence' if stalls else 'closed'})"


def kill_the_active(servers: Servers, rng: random.Random) -> str:
    if (active := servers.active()) is not None:
        active.signal(signal.SIGKILL)
    return "active server killed"


def stop_the_active(servers: Servers, rng: random.Random) -> str:
    if (active := servers.active()) is not None:
        active.signal(signal.SIGSTOP)
        pause(servers, rng.uniform(0.5, LONGEST_S))
        active.signal(signal.SIGCONT)
    return "active server stopped for a while"


def kill_both(servers: Servers, rng: random.Random) -> str:
    for what in servers.homes:
        servers.site.children[what].signal(signal.SIGKILL)
    return "both servers killed"


def kill_postgres(servers: Servers, rng: random.Random) -> str:
    engines.postgres().kill()
    pause(servers, rng.uniform(0.0, 2.0))
    engines.postgres().start()
    return "PostgreSQL killed"


def kill_the_store(servers: Servers, rng: random.Random) -> str:
    engines.weed().kill()
    pause(servers, rng.uniform(0.0, 2.0))
    engines.weed().start()
    return "SeaweedFS killed"


def stop_the_store(servers: Servers, rng: random.Random) -> str:
    process = engines.weed().process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    pause(servers, rng.uniform(0.5, LONGEST_S))
    process.send_signal(signal.SIGCONT)
    return "SeaweedFS stopped for a while"


def pause(servers: Servers, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        servers.supervise()


Fault = Callable[[Servers, random.Random], str]
KINDS: tuple[Fault, ...] = (
    kill_the_active, kill_postgres, kill_the_store, cut_the_active, stop_the_active, kill_both, stop_the_store,
)  # fmt: skip


def faults_of(seed: int | None, rng: random.Random) -> list[Fault]:
    """Return the faults of a run: one of each kind in turn, and others drawn; none without a seed."""
    return [] if seed is None else [KINDS[seed % len(KINDS)], *rng.choices(KINDS, k=rng.randint(0, FAULTS - 1))]


def run(site: Site, seed: int | None, story: list[str]) -> Outcome:
    """Run the federation with the faults of a seed, or undisturbed, and return its outcome.

    Raises:
        Red: The run has failed.
    """
    with contextlib.ExitStack() as stack:
        servers = Servers(site)
        for way in servers.ways.values():
            stack.callback(way.close)
        return _run(servers, seed, story)


def _run(servers: Servers, seed: int | None, story: list[str]) -> Outcome:
    site, rng = servers.site, random.Random(seed)
    fleet = site.start_device("fleet")
    faults = faults_of(seed, rng)
    due = time.monotonic() + SETTLED_S
    while fleet.exit is None:
        site.check_time("every device to have its model")
        servers.supervise()
        if faults and time.monotonic() > due:
            story.append(faults.pop(0)(servers, rng))
            due = time.monotonic() + rng.uniform(0.1, 1.5)
        time.sleep(LOOK_S)
    if fleet.exit != 0:
        raise Red(f"{fleet}")
    if seed is not None and not story:
        raise Red("it was over before the first fault")
    if noise := site.tracebacks():
        raise Red(f"noise in {', '.join(noise)}")
    site.kill_all()
    return site.outcome()


@click.command()
@click.option("--runs", type=int, default=30, envvar="CHAOS_RUNS", show_default=True)
@click.option("--seed", type=int, default=0, envvar="CHAOS_SEED", show_default=True, help="Of the first run.")
@click.option("--patience", "patience_s", type=float, default=120.0, show_default=True, help="Seconds that a run may last.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("chaos-scale.jsonl"), show_default=True)
def main(runs: int, seed: int, patience_s: float, out: Path) -> None:
    """Run two servers under seeded faults."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-scale-"))
    done = {json.loads(line)["seed"] for line in out.read_text().splitlines()} if out.exists() else set[int]()
    with Site(folder / "undisturbed", SHAPE, patience_s) as site:
        expected = run(site, None, [])
    red = 0
    for number in (one for one in range(seed, seed + runs) if one not in done):
        began, story, why = time.monotonic(), list[str](), ""
        with Site(folder / f"run{number}", SHAPE, patience_s) as site:
            try:
                why = "; ".join(run(site, number, story).differences(expected))
            except Red as failed:
                why = str(failed)
        red += bool(why)
        result = {"seed": number, "story": story, "seconds": round(time.monotonic() - began, 1), "why": why}
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{number:5} {result['seconds']:5.1f} s {'RED: ' + why if why else 'green'}  {', '.join(story)}", flush=True)
        if not why:
            site.remove()
    print(f"{runs} runs, {red} red; red ones are kept in {folder}" if red else f"{runs} runs, none red")
    sys.exit(1 if red else 0)


if __name__ == "__main__":
    main()
