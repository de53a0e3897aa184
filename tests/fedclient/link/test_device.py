"""A whole life of a device over each link. The app knows only the port; the local link works without gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import msgspec

from attune.common.config import TrainSettings
from attune.common.exchange.messages import BlobRef, Farewell, Order, Welcome
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import Plan
from attune.common.wire.files import read_tensors, write_tensors
from attune.fedclient.address import ServerAddress
from attune.fedclient.console import Console
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.shard import load_shard
from attune.fedclient.device import Device
from attune.fedclient.home import DeviceHome
from attune.fedclient.link.port import Link
from attune.fedclient.options import DeviceOptions
from attune.fedclient.store import FolderStore
from attune.fedclient.work.worker import Worker
from tests.fedclient.conftest import tabular_shard
from tests.fedclient.link.server import Scripted
from tests.fedclient.link.test_conformance import until

CLASSES = ["ant", "bee", "cow"]


def test_a_device_trains_and_hands_in_over_any_link(play, tmp_path):
    spec = default_spec("tabular", (6,), 3, 0, "mlr", {})
    plan = Plan("f", 3, spec, CLASSES, "fedavg", {}, TrainSettings(local_epochs=1))
    served = write_tensors(tmp_path / "served.safetensors", tensors_of(build(spec, 3)))
    folder = tabular_shard(tmp_path / "shard")
    options = DeviceOptions(data=folder, server=ServerAddress("127.0.0.1", 1), device="cpu")
    home, shard = DeviceHome(tmp_path / "home"), LazyShard.in_memory(load_shard(folder))

    async def scenario(link: Link, server: Scripted):
        server.offer((tmp_path / "served.safetensors").read_bytes())
        order = Order("train-1-kiel", 1, "train", (BlobRef("shared", served.digest, served.size),), ("shared",))
        with home.locked(), Worker() as worker:
            life = asyncio.create_task(Device(options, shard, FolderStore(home), link, Console(), worker).run())
            await until(lambda: server.streams or life.done())
            for said in (Welcome(msgspec.json.encode(plan)), order):
                server.streams[0].unsent.put_nowait(said)
            await until(lambda: server.submits or life.done())
            server.streams[0].unsent.put_nowait(Farewell("over"))
            return await life, server

    path, server = play(scenario)
    [update] = server.submits
    [part] = update.parts
    assert (update.order_id, update.samples, part.part) == ("train-1-kiel", 36, "shared")  # four of 40 samples are held out
    (tmp_path / "handed_in").write_bytes(server.here[part.digest])
    handed_in, kept = read_tensors(tmp_path / "handed_in"), read_tensors(path / "model.safetensors")
    assert handed_in.keys() == kept.keys()
    assert all(handed_in[name].equal(kept[name]) for name in kept)


def test_the_local_link_imports_no_grpc():
    script = "import sys, attune.fedclient.link.local; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
