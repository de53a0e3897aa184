"""Bytes through the server's port, and seconds of a round, with streams and with direct transfers.

`python -m benchmarks.direct --method fedavg --transfer direct --ledger URL --blobs s3://...` with an empty database and
prefix. A proxy before the port counts the bytes. Each run replaces its own row of the file. `--transfer folder` needs no
URLs: its state is in a folder.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from attune.common import aio
from attune.fedclient import fleet, shards
from attune.fedclient.address import ServerAddress, store_origin
from attune.fedclient.console import Console
from attune.fedclient.options import DeviceOptions
from attune.fedserver import app
from attune.fedserver.home import ServerHome, StoragePlace, place_of
from benchmarks.machine import machine
from benchmarks.rough import DOWN, UP, Proxy

DEVICES, ROUNDS, FEATURES, HIDDEN = 4, 3, 500, 2000  # 1,022,020 values
RESULTS = Path(__file__).parent / "results" / "direct.json"


def shard(folder: Path, seed: int) -> Path:
    """Write random samples of ten classes, and return their folder."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for name, count in (("train", 40), ("test", 10)):
        np.savez(folder / f"{name}.npz", x=rng.normal(size=(count, FEATURES)).astype("f4"), y=np.arange(count) % 10)
    return folder


def run(folder: Path, method: str, transfer: str, place: StoragePlace | None) -> dict[str, Any]:
    """Run a federation, and return what passed through the port."""
    os.environ["ATTUNE_HOME"] = str(folder)
    home = ServerHome(folder / "server")
    settings = {
        "method": {"name": method},
        "model": {"name": "dnn", "hidden": [HIDDEN]},
        "round": {"rounds": ROUNDS, "min_clients": DEVICES},
        "train": {"local_steps": 1},
        "server": {"transfer": "direct" if transfer == "direct" else "stream", "threads": 1},
    }
    options = app.ServerOptions(home.path, "127.0.0.1", 0, True, lambda line: None, dashboard="off", storage=place)
    server = threading.Thread(target=lambda: aio.run(app.run(options, settings)))
    server.start()
    while (address := home.address()) is None:
        time.sleep(0.1)
    proxy = Proxy(address.port)
    token = (home.path / "local-token").read_text()
    common = DeviceOptions(
        Path(), ServerAddress("localhost", proxy.port), folder / "devices", device="cpu", token=token,
        direct_hosts=(store_origin(os.environ["AWS_ENDPOINT_URL"]),) if place else (),
    )  # fmt: skip
    members = shards.members([shard(folder / f"shard{number}", number) for number in range(DEVICES)], common)
    named = [replace(one, name=f"d{number}", home=folder / "devices" / f"d{number}") for number, one in enumerate(members)]
    began = time.monotonic()
    outcomes = fleet.run(named, Console())
    took_s = time.monotonic() - began
    server.join()
    passed = dict(proxy.passed)
    proxy.close()
    if failures := fleet.failures(outcomes):
        raise click.ClickException(str(failures))
    rows = home.snapshot().rows
    return {
        "method": method, "transfer": transfer, "devices": DEVICES, "rounds": ROUNDS,
        "bytes_of_updates": sum(row.bytes_up for row in rows), "port_up": passed[UP], "port_down": passed[DOWN],
        "seconds": round(took_s, 1),
    }  # fmt: skip


@click.command()
@click.option("--method", required=True)
@click.option("--transfer", type=click.Choice(["folder", "stream", "direct"]), required=True)
@click.option("--ledger")
@click.option("--blobs")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
def main(method: str, transfer: str, ledger: str | None, blobs: str | None, out: Path) -> None:
    before = msgspec.json.decode(out.read_bytes())["runs"] if out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        row = run(Path(folder), method, transfer, place_of(ledger, blobs) if transfer != "folder" else None)
    others = [one for one in before if (one["method"], one["transfer"]) != (method, transfer)]
    runs = sorted([*others, row], key=lambda one: (one["method"], one["transfer"]))
    out.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine(), "runs": runs}), indent=1) + b"\n")
    click.echo(msgspec.json.encode(row).decode())


if __name__ == "__main__":
    main()
