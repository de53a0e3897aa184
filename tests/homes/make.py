"""`make homes REV=...`: homes of this folder, made with a revision's own commands, and the expected results.

Each home lies in an archive: the server's home, its devices' homes and their shards. A later version must continue them, to the
bits in expected.json, or refuse them in one line.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import numpy as np

from attune.common.hardware import processor_name
from tests.forked import KERNELS, STEADY
from tests.same_bits.__main__ import worktree
from tests.same_bits.driver import digests, of_tensors

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
PATIENCE_S = 180.0
# The same kernels on every x86-64 machine of a maker: otherwise bits depend on its processor's instructions.
PORTABLE = dict(zip(KERNELS, ("default", "COMPATIBLE", "SSE41"), strict=True))
ENTRY = """import sys
from importlib.metadata import entry_points
[entry] = entry_points(group="console_scripts", name=sys.argv[1])
del sys.argv[0]
sys.exit(entry.load()())"""
HOST = "host"  # prefix of the devices' names
CERTIFICATES = ("--set", "server.certificate_days=36500")
FAST = ("--set", "train.lr=0.1", "--set", "train.local_steps=20")
ROUNDS = ("--set", "train.local_epochs=1", "--set", "train.batch_size=8", "--set", "server.threads=1", "--seed", "3")
VIT = ("--set", "model.width=8", "--set", "model.heads=2", "--set", "model.depth=1", "--set", "model.patch=4")
SMALL_NETWORK = ("--set", "method.hidden=16", "--set", "method.layers=1", "--set", "method.embedding_dim=8")
SETTINGS: dict[str, tuple[str, ...]] = {
    # Generated, shared and private parts, and the error feedback of int8.
    "midrun": ("--method", "fedtp+fedper", *VIT, *SMALL_NETWORK, "--rounds", "4", "--set", "round.encoding=int8"),
    # A value for each device, tables with named columns, a baseline, weights for each component.
    "finished": ("--method", "fedmcsa", "--rounds", "3", "--set", "method.dial=true", "--set", "model.hidden=[8]", *FAST),
    "newcomers": ("--method", "fedtp", *VIT, *SMALL_NETWORK, "--rounds", "2", "--set", "round.adapt_rounds=2"),
    # Rows with digests in the database (schema 3), and the head of the audit log.
    "schema3": ("--method", "fedper", "--model", "dnn", "--set", "model.hidden=[8]", "--rounds", "3"),
}
STANDS_STILL = ("midrun", "schema3")  # in round 2
# Devices that come back when a home is continued; a finished home needs none.
COMING = {"midrun": ("d0", "d1", "d2"), "newcomers": ("d2",), "schema3": ("d0", "d1", "d2")}


class Site:
    """Commands of one revision, below one folder."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        path = {"PYTHONPATH": f"{root / '.package'}{os.pathsep}{root}", "ATTUNE_HOME": str(folder / "none")}
        self._environment = os.environ | STEADY | PORTABLE | path
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, *words: str, fault: str = "") -> subprocess.Popen[bytes]:
        """Start a command; what it prints goes to a file."""
        with (self.folder.parent / f"{self.folder.name}-{len(self._running)}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", ENTRY, *words],
                cwd=self.folder,
                env=self._environment | {"ATTUNE_FAIL_AT": fault},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running.append(process)
        return process

    def server(self, *words: str, fault: str = "") -> int:
        """Start the server; return its port once it listens."""
        address = self.folder / "server" / "server.json"
        address.unlink(missing_ok=True)
        flags = ("--home", "server", "--host", "127.0.0.1", "--port", "0", "--dashboard", "off", "--join-uses", "9")
        self.start("fedserver", *flags, *words, fault=fault)
        until(address.exists, "the server to listen")
        return int(json.loads(address.read_bytes())["port"])

    def device(self, port: int, *names: str, more: tuple[str, ...] = (), fault: str = "") -> subprocess.Popen[bytes]:
        """Start one device, or a process that hosts several."""
        data = [word for name in names for word in ("--data", self._shard(name))]
        alone = len(names) == 1
        place = ("--name", f"{HOST}-{names[0]}" if alone else HOST, "--home", f"devices/{names[0]}" if alone else "devices")
        to = ("--server", f"localhost:{port}", "--token-file", "server/local-token", "--device", "cpu", "--threads", "1")
        return self.start("fedclient", *data, *place, *to, *more, fault=fault)

    def command(self, *words: str) -> str:
        """Run a command to its end and return what it printed."""
        line = [sys.executable, "-c", ENTRY, *words]
        return subprocess.run(line, cwd=self.folder, env=self._environment, check=True, capture_output=True, text=True).stdout

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.command("fedserver", "status", "--json", "--home", "server")))

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        assert process.wait(PATIENCE_S) == 0, f"a command of {self.folder} failed; its log lies beside"

    def kill(self) -> None:
        """Kill all running processes with kill -9."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _shard(self, name: str) -> str:
        [found] = (self.folder / "shards").glob(f"{name}.*")
        return f"shards/{found.name}"


def until(happened: Callable[[], Any], what: str) -> None:
    """Wait for a true value of `happened`."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"in vain: {what}"
        time.sleep(0.1)


def write_shards(folder: Path, kind: str) -> None:
    """Write three shards: images, or tables with named columns."""
    folder.mkdir(parents=True)
    for number in range(3):
        rng = np.random.default_rng(number)
        y = (rng.integers(0, 3, 40) + number) % 4
        if kind == "finished":
            x = rng.normal(size=(40, 3)) + y[:, None] * [1.5, -1.0, 0.5]
            lines = [
                "age,dose,weight,ill,split",
                *(
                    ",".join(f"{v:.3f}" for v in row) + f",{label},{'test' if n % 4 == 0 else 'train'}"
                    for n, (row, label) in enumerate(zip(x, y, strict=True))
                ),
            ]
            (folder / f"d{number}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        else:
            pattern = np.random.default_rng(9).normal(size=(4, 8, 8, 1))
            x = (pattern[y] + rng.normal(size=(40, 8, 8, 1))).astype("f4")
            np.savez_compressed(folder / f"d{number}.npz", train_x=x[:30], train_y=y[:30], test_x=x[30:], test_y=y[30:])


def begin(site: Site, kind: str) -> None:
    """Run a federation to the point at which its home is kept, and kill all its processes there."""
    write_shards(site.folder / "shards", kind)
    flags = (*SETTINGS[kind], *ROUNDS, *CERTIFICATES)
    if kind in STANDS_STILL:  # two devices have handed in, and one has carried out its order and not handed in
        port = site.server(*flags, "--min-clients", "3")
        site.device(port, "d0", "d1")
        site.device(port, "d2", fault=f"{HOST}-d2:2:order-committed=hang")
        inbox, order = site.folder / "server" / "inbox", site.folder / "devices" / "d2" / "orders" / f"train-2-{HOST}-d2"
        until(lambda: order.exists() and len(list(inbox.glob("train-2-*/update.json"))) == 2, "round 2 to stand still")
    elif kind == "finished":
        port = site.server(*flags, "--min-clients", "3", "--exit-when-done")
        site.ended(site.device(port, "d0", "d1", "d2", more=("--label", "ill", "--baseline", "local")))
        site.ended(site._running[0])
    else:  # a newcomer's second round is aggregated and not committed
        port = site.server(*flags, "--min-clients", "2", fault="server:4:aggregated=hang")
        site.ended(site.device(port, "d0", "d1"))
        until(lambda: site.status()["state"] == "done", "the federation to be done")
        site.device(port, "d2")
        until(lambda: site.status()["state"] == "aggregating" and site.status()["round"] == 3, "the newcomer's second round")
    site.kill()


def go_on(site: Site, kind: str) -> dict[str, Any]:
    """Continue a home to its end, and return its content; for the finished home, return what commands show of it."""
    if kind == "finished":
        return shown(site.folder, site.command)
    port = site.server()
    site.ended(site.device(port, *COMING[kind]))
    until(lambda: site.status()["state"] == "done", "the federation to be done")
    site.kill()
    return held(site.folder)


def held(folder: Path) -> dict[str, str]:
    """Return the digests of a home and of its devices' homes."""
    return digests(folder / "server", {path.name: path for path in (folder / "devices").iterdir()})


def shown(folder: Path, command: Callable[..., str]) -> dict[str, Any]:
    """Return what status, export, predict and verify show of the finished home: numbers, digests and answers."""
    status = json.loads(command("fedserver", "status", "--json", "--home", str(folder / "server")))
    out = folder / "exported"
    command("fedserver", "export", "--home", str(folder / "server"), "--out", str(out))
    predicted = {}
    for home in sorted((folder / "devices").iterdir()):
        data, answers = folder / "shards" / f"{home.name}.csv", folder / f"{home.name}-answers.csv"
        command("fedclient", "predict", "--data", str(data), "--home", str(home), "--out", str(answers))
        rows = answers.read_text(encoding="utf-8").splitlines()
        predicted[home.name] = " ".join(row.split(",")[1] for row in rows[1:])
    return {
        "status": {key: status[key] for key in ("state", "method", "round", "rounds")},
        "accuracies": {client["name"]: client["accuracy"] for client in status["clients"]},
        "exported": {str(path.relative_to(out)): of_tensors(path) for path in sorted(out.rglob("*.safetensors"))},
        "predicted": predicted,
    }


def pack(folder: Path, archive: Path) -> None:
    """Write server, devices and shards of a site to an archive, without times, users and locks."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        entry.mtime = entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return None if entry.name.endswith("/lock") else entry

    with tarfile.open(archive, "w:xz") as packed:
        for name in ("server", "devices", "shards"):
            packed.add(folder / name, name, filter=plain)


def unpack(archive: Path, folder: Path) -> None:
    """Write what an archive of this folder holds to another folder."""
    folder.mkdir(parents=True)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")


@click.command()
@click.option("--rev", required=True, help="The revision that makes the homes.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(SETTINGS)), help="These alone.")
def main(rev: str, kinds: tuple[str, ...]) -> None:
    """Write the archives and expected.json of this folder."""
    noted = json.loads(EXPECTED.read_text(encoding="utf-8"))
    noted |= {"torch": version("torch"), "machine": platform.machine(), "processor": processor_name()}
    with tempfile.TemporaryDirectory(prefix="homes-") as scratch, worktree(Path(scratch) / "tree", rev) as root:
        for kind in kinds or SETTINGS:
            folder, archive = Path(scratch) / kind, HERE / f"{kind}.tar.xz"
            folder.mkdir()
            with Site(root, folder) as site:
                begin(site, kind)
            pack(folder, archive)
            again = Path(scratch) / "again" / kind
            unpack(archive, again)
            with Site(root, again) as site:
                noted["homes"][kind] = go_on(site, kind)
            noted["made_by"][kind] = rev
            click.echo(f"{archive.name}: {archive.stat().st_size} bytes")
    EXPECTED.write_text(json.dumps(noted, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
