"""`make chaos-scale`: seeded runs of two servers over PostgreSQL and SeaweedFS, which are killed and stopped in turn.

No run may hang, lose an update or commit twice: the outcome must be that of an undisturbed run. Each result is appended to the
file of results at once, and a seed that is there is not run again.
"""

from __future__ import annotations

import json
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
        site.server_words = engines.remote_words()
        site.start_server()
        self.homes = {"server": site.server_home, "standby": site.folder / "standby"}
        self.ports = {"server": site.port, "standby": engines.free_port()}
        shutil.copytree(site.server_home / "ca", self.homes["standby"] / "ca")
        self.start("standby")
        site.addresses = ",".join(f"localhost:{port}" for port in self.ports.values())

    def start(self, what: str) -> None:
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
KINDS: tuple[Fault, ...] = (kill_the_active, stop_the_active, kill_postgres, kill_both, stop_the_store)


def run(site: Site, rng: random.Random | None, story: list[str]) -> Outcome:
    """Run the federation with the faults of a seed, or undisturbed, and return its outcome.

    Raises:
        Red: The run has failed.
    """
    servers = Servers(site)
    fleet = site.start_device("fleet")
    faults = [] if rng is None else rng.choices(KINDS, k=rng.randint(1, FAULTS))
    due = time.monotonic() + SETTLED_S
    while fleet.exit is None:
        site.check_time("every device to have its model")
        servers.supervise()
        if rng is not None and faults and time.monotonic() > due:
            story.append(faults.pop()(servers, rng))
            due = time.monotonic() + rng.uniform(0.1, 1.5)
        time.sleep(LOOK_S)
    if fleet.exit != 0:
        raise Red(f"{fleet}")
    if rng is not None and not story:
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
                why = "; ".join(run(site, random.Random(number), story).differences(expected))
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
