"""Kinds of faults for federations, each drawn from a seed."""

import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from attune.common import faults
from benchmarks.rough import DOWN, UP, Cut, Proxy
from tests.chaos.drive import Trial, kill
from tests.chaos.site import Child, Red, Shape, Site

TRANSFERRED = "server.inline_bytes=0"  # otherwise such small parts travel within orders and updates, as in the other trials
CHANGES = "round.served=zstd"  # values are served as changes from what the device holds
SMALL = (
    Shape("fedavg", 3, ("method.name=fedavg", "model.name=mlr", "round.rounds=3", "train.local_epochs=1")),
    Shape(
        "fedmcsa",
        3,
        (
            "method.name=fedmcsa",
            "model.name=mlr",
            "round.rounds=3",
            "round.train=all",
            "round.clients=2",
            "train.local_steps=3",
        ),
        hosted=True,
    ),
    Shape(
        "fedper", 2, ("method.name=fedper", "model.name=dnn", "round.rounds=4", "train.local_epochs=1", TRANSFERRED, CHANGES)
    ),
    Shape(
        "pfedhn",
        4,
        ("method.name=pfedhn", "model.name=mlr", "round.rounds=3", "train.local_epochs=1", TRANSFERRED, CHANGES),
        hosted=True,
    ),
)
WIDE_BYTES = 4 * (6 * 1500 + 1500 + 1500 * 100 + 100 + 100 * 3 + 3)
WIDE = Shape(
    "wide", 2, ("method.name=fedavg", "model.name=dnn", "model.hidden=[1500, 100]", "round.rounds=2", "train.local_epochs=1")
)
HEAVY_BYTES = 4 * (6 * 1500 + 1500 + 1500 * 180 + 180 + 180 * 3 + 3)  # 1.1 MB
HEAVY = Shape(
    "heavy", 2, ("method.name=fedavg", "model.name=dnn", "model.hidden=[1500, 180]", "round.rounds=1", "train.local_epochs=1")
)
THIN_BYTES_PER_S, CUT_EVERY_S, MOST_SENT = 125e3, 8.0, 1.5
CHURN = Shape(
    "churn",
    20,
    (
        *(
            "method.name=fedavg",
            "model.name=mlr",
            "round.rounds=4",
            "round.clients=10",
            "round.quorum=5",
            "round.deadline_s=15",
        ),
        *("round.grace_s=1", "round.replace_after_s=1", "train.local_epochs=1"),
    ),
    hosted=True,
)
HANDSHAKE_BYTES = 4000  # bytes of a connection before the first blob
TENTHS = 10
FLEETS = 4
SLOW = "*:*:training=sleep:0.1"
REFUSES = 4  # the exit code of a side that finds its home damaged


class KilledServer(Trial):
    """kill -9 of the server at one of its steps, and again at another."""

    def __init__(self, rng: random.Random, rounds: int) -> None:
        self.again = [_step(rng, faults.SERVER_STEPS, faults.SERVER, rounds, "kill") for _ in range(2)]

    def faults(self, who: str) -> str:
        return ",".join(self.again) if who == "server" else ""


class KilledDevices(Trial):
    """kill -9 of devices (or of the process that hosts them) at their steps."""

    def __init__(self, rng: random.Random, shape: Shape, rounds: int) -> None:
        self.of = {
            group: _step(
                rng, faults.DEVICE_STEPS, f"edge-{rng.choice(shape.shards) if shape.hosted else group}", rounds, "kill"
            )
            for group in (["fleet"] if shape.hosted else rng.sample(shape.shards, 2))
        }

    def faults(self, who: str) -> str:
        return self.of.get(who, "")


class KilledBoth(Trial):
    def __init__(self, rng: random.Random, shape: Shape, rounds: int) -> None:
        self.server, self.devices = KilledServer(rng, rounds), KilledDevices(rng, shape, rounds)

    def faults(self, who: str) -> str:
        return self.server.faults(who) or self.devices.faults(who)


class KilledAtRandom(Trial):
    """kill -9 at random times, of random processes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._times = sorted(rng.uniform(0.2, 4.0) for _ in range(rng.randint(2, 5)))

    def faults(self, who: str) -> str:
        return "" if who == "server" else SLOW

    def tick(self, site: Site, elapsed_s: float) -> None:
        while self._times and elapsed_s >= self._times[0]:
            self._times.pop(0)
            kill(site.children[self._rng.choice(["server", *site.groups])])


class CutConnections(Trial):
    """Reset of connections at a tenth of a transfer, up or down, once for each of some connections."""

    def __init__(self, rng: random.Random) -> None:
        self.cuts = [
            Cut(rng.choice((UP, DOWN)), HANDSHAKE_BYTES + WIDE_BYTES * rng.randrange(TENTHS) // TENTHS)
            for _ in range(rng.randint(2, 5))
        ]

    def listening(self, site: Site) -> None:
        site.proxy = Proxy(site.port, self.cuts)

    def ended(self, site: Site) -> None:
        if site.proxy is not None and len(site.proxy.cuts) == len(self.cuts):
            raise Red("no connection was cut: this run has shown nothing")


class Throttled(Trial):
    """A slow link in both directions."""

    def __init__(self, rng: random.Random) -> None:
        self._rate_bytes = rng.choice((200e3, 400e3, 800e3))

    def listening(self, site: Site) -> None:
        site.proxy = Proxy(site.port, rate_bytes=self._rate_bytes)


class OftenCut(Trial):
    """A thin link that is cut every eight seconds, while an update needs nine: what has arrived is not sent again."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def listening(self, site: Site) -> None:
        site.proxy = Proxy(site.port, rate_bytes=THIN_BYTES_PER_S)

    def tick(self, site: Site, elapsed_s: float) -> None:
        if site.proxy is not None and elapsed_s > (self._next_s or CUT_EVERY_S):
            self._next_s = elapsed_s + CUT_EVERY_S
            site.proxy.cut_all()

    def ended(self, site: Site) -> None:
        assert site.proxy is not None
        if not self._next_s:
            raise Red("no connection was cut: this run has shown nothing")
        share = site.proxy.passed[UP] / (HEAVY.devices * HEAVY_BYTES)
        self.story = f"sent {share:.2f} times the bytes of the updates"
        if share > MOST_SENT:
            raise Red(self.story)


class Silent(Trial):
    """Network that passes no bytes for a while, with all connections open."""

    def __init__(self, rng: random.Random, longest_s: float) -> None:
        self._times = sorted(rng.uniform(0.1, 3.0) for _ in range(2))
        self._spans_s = [rng.uniform(1.0, longest_s) for _ in self._times]

    def faults(self, who: str) -> str:
        return "" if who == "server" else SLOW

    def listening(self, site: Site) -> None:
        site.proxy = Proxy(site.port)

    def tick(self, site: Site, elapsed_s: float) -> None:
        while self._times and elapsed_s >= self._times[0] and site.proxy is not None:
            self._times.pop(0)
            site.proxy.silence(self._spans_s.pop())


class Stopped(Trial):
    """SIGSTOP, and SIGCONT some seconds later, of the server or of devices."""

    def __init__(self, rng: random.Random, longest_s: float) -> None:
        self._rng, self._longest_s = rng, longest_s
        self._times = sorted(rng.uniform(0.1, 3.0) for _ in range(2))
        self._wakes: list[tuple[float, Child]] = []

    def faults(self, who: str) -> str:
        return "" if who == "server" else SLOW

    def tick(self, site: Site, elapsed_s: float) -> None:
        while self._times and elapsed_s >= self._times[0]:
            self._times.pop(0)
            child = site.children[self._rng.choice(["server", *site.groups])]
            child.signal(signal.SIGSTOP)
            self._wakes.append((elapsed_s + self._rng.uniform(1.0, self._longest_s), child))
        for wake in [wake for wake in self._wakes if elapsed_s >= wake[0]]:
            self._wakes.remove(wake)
            wake[1].signal(signal.SIGCONT)

    def rested(self, site: Site) -> bool:
        return not self._wakes


class FullDisk(Trial):
    """Full disk of one side for some seconds; a small tmpfs takes its place."""

    tolerated = (17,)  # a device without space ends with this exit code

    def __init__(self, rng: random.Random) -> None:
        self._side = rng.choice(("server", "devices"))
        self._begin_s = rng.uniform(0.0, 2.5)
        self._end_s = self._begin_s + rng.uniform(1.5, 4.0)
        self._place: Path | None = None
        self._full = False

    def faults(self, who: str) -> str:
        return "" if who == "server" else SLOW

    def prepare(self, site: Site) -> None:
        self._place = site.server_home if self._side == "server" else site.devices_home
        self._place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(self._place)], check=True)

    def tick(self, site: Site, elapsed_s: float) -> None:
        assert self._place is not None
        filler = self._place / "filler"
        if self._begin_s <= elapsed_s < self._end_s:
            try:
                with filler.open("ab") as file:
                    while True:
                        file.write(bytes(4096))
                        file.flush()
            except OSError:
                pass
        elif elapsed_s >= self._end_s:
            filler.unlink(missing_ok=True)

    def ended(self, site: Site) -> None:
        (self._place or Path()).joinpath("filler").unlink(missing_ok=True)


class FullAtAStep(Trial):
    """Write that fails for lack of space at one step, once; for machines where no tmpfs can be mounted."""

    tolerated = (17,)

    def __init__(self, rng: random.Random, shape: Shape, rounds: int) -> None:
        self._server = rng.random() < 0.5
        device = f"edge-{rng.choice(shape.shards)}"
        number = rng.randint(1, rounds)
        self._fault = (
            f"server:{number}:aggregated=raise-ENOSPC" if self._server else f"{device}:{number}:state-written=raise-ENOSPC"
        )

    def faults(self, who: str) -> str:
        return self._fault if self._server == (who == "server") else ""


class Damaged(Trial):
    """kill -9 at a step; before the next start a byte of one file is flipped, or its end is cut off.

    The result has the same bits, or there is one clear line and exit code 4. Then the file is restored from a backup, and the
    bits are the same again.
    """

    def __init__(self, rng: random.Random, shape: Shape, rounds: int) -> None:
        self._rng = rng
        self._of_server = shape.hosted or rng.random() < 0.6
        self._victim = rng.choice(shape.shards)
        steps, who = (faults.SERVER_STEPS, faults.SERVER) if self._of_server else (faults.DEVICE_STEPS, f"edge-{self._victim}")
        self._fault = _step(rng, steps, who, rounds, "kill", first_round=1)
        self._backup: tuple[Path, bytes] | None = None
        self.story = ""

    def faults(self, who: str) -> str:
        return self._fault if who == ("server" if self._of_server else self._victim) else ""

    def died(self, site: Site, child: Child) -> None:
        if self.story or child.exit != -signal.SIGKILL:
            return
        home = site.server_home if self._of_server else site.devices_home / self._victim
        files = [path for path in sorted(home.rglob("*")) if _can_be_damaged(path)]
        if not files:
            return
        # Choose the kind first, because there are many files of some kinds.
        kinds = sorted({_kind(path) for path in files})
        kind = self._rng.choice(kinds)
        path = self._rng.choice([path for path in files if _kind(path) == kind])
        data = path.read_bytes()
        at = self._rng.randrange(len(data))
        cut = self._rng.random() < 0.4
        flipped = data[:at] + bytes([data[at] ^ (1 << self._rng.randrange(8))]) + data[at + 1 :]
        path.write_bytes(data[:at] if cut else flipped)
        self._backup = (path, data)
        self.story = f"{path.relative_to(site.folder)}: {'cut at' if cut else 'flipped'} {at} of {len(data)}"

    def refused(self, site: Site, child: Child) -> bool:
        if self._backup is None or child.exit != REFUSES:
            return False
        said = [line for line in child.text.splitlines() if line.startswith(("fedserver: ", "fedclient: "))]
        named = (self._backup[0].name.removesuffix("-wal").removesuffix("-shm"), str(self._backup[0].parent))
        if len(said) != 1 or not any(name in said[0] for name in named):
            raise Red(f"exit {child.exit} without one line that names {self._backup[0].name}: {said}")
        path, data = self._backup
        path.write_bytes(data)
        self._backup = None
        self.story += "; refused, then restored"
        return True


class Jumping(Trial):
    """Time of day of the server that jumps by up to an hour, back and forth."""

    def prepare(self, site: Site) -> None:
        site.clock_jumps = True


class Churn(Trial):
    """Twenty devices in some processes that are killed and come back, like the server, while rounds go on."""

    compares = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._times = sorted(rng.uniform(1.0, 12.0) for _ in range(12))

    def tick(self, site: Site, elapsed_s: float) -> None:
        groups = sorted(site.children.keys() - {"server"})
        while self._times and elapsed_s >= self._times[0]:
            self._times.pop(0)
            kill(site.server if self._rng.random() < 0.15 else site.children[self._rng.choice(groups)])

    def faults(self, who: str) -> str:
        return "" if who == "server" else SLOW


FLEET_GROUPS = [f"fleet{number}of{FLEETS}" for number in range(FLEETS)]


def _step(rng: random.Random, steps: dict[str, str], who: str, rounds: int, action: str, first_round: int = 0) -> str:
    """Return a fault at one of the steps, in a round in which it can occur."""
    only_first = ("settings-written", "plan-committed", "certificate-issued", "key-written", "certificate-kept", "plan-kept")
    only_last = ("evaluation-committed", "model-saved")
    step = rng.choice([step for step in sorted(steps) if not (first_round and step in only_first)])
    number = 0 if step in only_first else rounds if step in only_last else rng.randint(1, rounds)
    return f"{who}:{number}:{step}={action}"


def _can_be_damaged(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0 and path.name != "lock"


def _kind(path: Path) -> str:
    """Return the kind of a file: `state/shared.value.2.safetensors` and `state/attended.s1.1.safetensors` have the same."""
    return (
        f"{path.parent.name if path.parent.name in ('state', 'uploads', 'serve', 'ca') else ''}/{path.suffix}/{path.stem[:3]}"
    )


def unmount(site: Site) -> None:
    for place in (site.server_home, site.devices_home):
        if place.is_mount():
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def can_mount(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    mounted = shutil.which("mount") is not None and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode == 0
    )
    if mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    return mounted


Make = Callable[[random.Random], tuple[Shape, Trial]]


def kinds(longest_s: float, mounts: bool) -> list[tuple[str, Make]]:
    """Return every kind by its name; the kinds that find most are listed more than once.

    `longest_s` is the longest time of silence or of a stopped process.
    """

    def rounds_of(shape: Shape) -> int:
        return next(int(each.partition("=")[2]) for each in shape.settings if each.startswith("round.rounds="))

    def small(make: Callable[[random.Random, Shape, int], Trial], shapes: tuple[Shape, ...] = SMALL) -> Make:
        def made(rng: random.Random) -> tuple[Shape, Trial]:
            shape = rng.choice(shapes)
            return shape, make(rng, shape, rounds_of(shape))

        return made

    def wide(make: Callable[[random.Random], Trial]) -> Make:
        return lambda rng: (WIDE, make(rng))

    killed_server = ("server killed at a step", small(lambda rng, shape, rounds: KilledServer(rng, rounds)))
    killed_devices = ("devices killed at a step", small(KilledDevices))
    damaged = ("file damaged after a kill", small(Damaged))
    cut = ("connections cut", wide(CutConnections))
    # If a round can close without a device, one without space is not waited for, and other bits are right.
    needed = tuple(shape for shape in SMALL if "round.train=all" not in shape.settings)
    full = small(lambda rng, shape, rounds: FullDisk(rng) if mounts else FullAtAStep(rng, shape, rounds), needed)
    return [
        killed_server,
        killed_devices,
        damaged,
        cut,
        ("both killed at steps", small(KilledBoth)),
        ("killed at random", small(lambda rng, shape, rounds: KilledAtRandom(rng))),
        killed_server,
        ("halted", small(lambda rng, shape, rounds: Stopped(rng, longest_s))),
        damaged,
        cut,
        ("silence", small(lambda rng, shape, rounds: Silent(rng, longest_s))),
        ("disk full", full),
        killed_devices,
        ("killed at random", small(lambda rng, shape, rounds: KilledAtRandom(rng))),
        damaged,
        ("throttled", wide(Throttled)),
        ("no room at a step", small(FullAtAStep)),
        ("clock jumps", small(lambda rng, shape, rounds: Jumping())),
        damaged,
        ("churn", lambda rng: (CHURN, Churn(rng))),
        ("cut every 8 s", lambda rng: (HEAVY, OftenCut())),
    ]
