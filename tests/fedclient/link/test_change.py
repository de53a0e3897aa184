"""A whole life of a device over each link: a served change is taken if it is the right one, else the whole value is fetched."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save

from attune.common.config import TrainSettings
from attune.common.exchange.encodings import encode
from attune.common.exchange.messages import BlobRef, Farewell, Order, Welcome
from attune.common.metrics import read_metrics
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import Plan
from attune.common.protocol import ENCODINGS
from attune.common.wire.digest import digest_of
from attune.common.wire.files import digest_of_tensors, read_tensors, write_tensors
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

zstd = pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")

Tensors = dict[str, torch.Tensor]
SPEC = default_spec("tabular", (6,), 3, 0, "dnn", {"hidden": [64]})
PLAN = Plan("f", 3, SPEC, ["ant", "bee", "cow"], "fedavg", {}, TrainSettings(local_epochs=1))


def moved(tensors: Tensors, by: float) -> Tensors:
    return {name: tensor + by * torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in tensors.items()}


FIRST: Tensors = {name: tensor.clone() for name, tensor in tensors_of(build(SPEC, 3)).items()}
SECOND = moved(FIRST, 1e-4)


class Said(Console):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def blob(tensors: Tensors, tmp_path: Any) -> bytes:
    write_tensors(tmp_path / "blob", tensors)
    return bytes((tmp_path / "blob").read_bytes())


def the_change(tensors: Tensors = SECOND, base: Tensors = FIRST) -> bytes:
    return save(encode(tensors, "zstd", base).tensors)


def bomb(size: int = 1 << 28) -> bytes:
    import zstandard

    stream = zstandard.ZstdCompressor().compressobj(size=size)
    frame = b"".join(stream.compress(bytes(1 << 20)) for _ in range(size >> 20)) + stream.flush()
    frames = len(frame[:100]).to_bytes(4, "little") * 4 + frame[:100] * 4
    packed = encode(SECOND, "zstd", FIRST).tensors
    largest = max(SECOND, key=lambda name: SECOND[name].numel())
    return save(packed | {largest: torch.frombuffer(bytearray(frames), dtype=torch.uint8)})


def troubles(server: Scripted) -> list[object]:
    return [what for _, what in server.said if isinstance(what, str)]


def life(play: Callable[..., Any], tmp_path: Any, change: bytes, base: str, inline: bool, offered: bool = True) -> Any:
    """Return the bytes of two orders' downloads, the device's lines, and the start of its second order."""
    folder, value = tabular_shard(tmp_path / "shard"), [blob(each, tmp_path) for each in (FIRST, SECOND)]
    options = DeviceOptions(data=folder, server=ServerAddress("127.0.0.1", 1), device="cpu")
    home, shard, console = DeviceHome(tmp_path / "home"), LazyShard.in_memory(load_shard(folder)), Said()
    digests = [digest_of(each) for each in value]
    sent = BlobRef("shared", digest_of(change), len(change), 1, "zstd", change if inline else b"")
    refs = (
        BlobRef("shared", digests[0], len(value[0])),
        BlobRef("shared", digests[1], len(value[1]), 1, smaller=sent, base=digests[0] if base == "held" else base),
    )

    async def scenario(link: Link, server: Scripted) -> Any:
        for data in (*value, *([change] if offered else [])):
            server.offer(data)
        with home.locked(), Worker() as worker:
            device = Device(options, shard, FolderStore(home), link, console, worker)
            running = asyncio.create_task(device.run())
            await until(lambda: server.streams or running.done())
            say = server.streams[0].unsent.put_nowait
            say(Welcome(msgspec.json.encode(PLAN)))
            down = []
            for number, ref in enumerate(refs, 1):
                say(Order(f"train-{number}-kiel", number, "train", (ref,), ("shared",)))
                await until(lambda number=number: len(server.submits) == number or running.done() or troubles(server))
                assert len(server.submits) == number, (troubles(server), console.lines)
                down.append(read_metrics(server.submits[-1].metrics_json, "kiel").bytes_down)
            received = device.slot.learner().state.received
            say(Farewell("over"))
            await running
            return down, console.lines, received

    return play(scenario)


@zstd
@pytest.mark.parametrize("inline", [False, True], ids=["fetched", "within the order"])
def test_the_change_is_enough(play, tmp_path, inline: bool) -> None:
    change = the_change()
    down, said, received = life(play, tmp_path, change, "held", inline)
    assert down[1] == len(change) < down[0]
    assert all(torch.equal(received[name].view(torch.int32), SECOND[name].view(torch.int32)) for name in SECOND)
    assert not [line for line in said if "as it is" in line]


@zstd
@pytest.mark.parametrize("base", ["sha256:" + 64 * "0", ""], ids=["of another value", "needs none"])
def test_a_change_from_what_is_not_held_is_not_asked_for(play, tmp_path, base: str) -> None:
    """Use a change without a base too, which is a compressed value."""
    change = save(encode(SECOND, "zstd").tensors) if not base else the_change()
    down, said, received = life(play, tmp_path, change, base, False)
    assert down[1] == (len(change) if not base else down[0])
    assert digest_of_tensors(received) == digest_of_tensors(SECOND)
    assert not [line for line in said if "as it is" in line]


FORGED = {
    "of another value": (lambda: the_change(moved(FIRST, 3e-4)), "comes to other bytes"),
    "from another base": (lambda: the_change(SECOND, moved(FIRST, 3e-4)), "comes to other bytes"),
    "whole values": (lambda: save(FIRST), "comes to other bytes"),
    "a bomb": (bomb, "a frame of zstd says that it holds"),
    "no tensors": (lambda: save({}), "missing"),
    "no blob": (lambda: b"not a blob", "part shared"),
}


@zstd
@pytest.mark.parametrize("kind", FORGED)
def test_any_other_change_is_refused_and_the_value_is_fetched(play, tmp_path, kind: str) -> None:
    make, why = FORGED[kind]
    down, said, received = life(play, tmp_path, make(), "held", False)
    [line] = [line for line in said if line.endswith("fetching it as it is")]
    assert why in line
    assert down[1] == down[0], "what was refused does not count"
    assert digest_of_tensors(received) == digest_of_tensors(SECOND)


@zstd
def test_a_server_that_has_the_change_no_longer_is_asked_for_the_value(play, tmp_path) -> None:
    """Use a server that was killed after its order."""
    down, said, received = life(play, tmp_path, the_change(), "held", False, offered=False)
    assert down[1] == down[0] and digest_of_tensors(received) == digest_of_tensors(SECOND)
    assert [line for line in said if "was not offered" in line]


@zstd
def test_what_is_kept_is_what_was_written(tmp_path) -> None:
    """Check that the digest by which a value is known is that of its bytes on the server."""
    odd = {
        "b": torch.zeros(0),
        "a": torch.randn(3, 5, dtype=torch.float64),
        "c": torch.tensor(7),
        "d": torch.ones(2, dtype=torch.bool),
    }
    written = write_tensors(tmp_path / "odd", odd)
    assert digest_of_tensors(odd) == written.digest
    assert digest_of_tensors(read_tensors(tmp_path / "odd")) == written.digest


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
