"""Served changes from an earlier value: they lead to the right value, to the last bit, or are not served."""

import pytest
import torch
from safetensors.torch import save

from attune.common.exchange.encodings import decoded, encode
from attune.common.exchange.messages import Order, Receipt
from attune.common.protocol import ENCODINGS, SPOKEN
from attune.common.wire.files import read_tensors
from attune.common.wire.tensors import manifest_of
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.orderbook import MISSES, OrderBook
from attune.fedserver.core.records import Smaller
from tests.fedserver.bench import Bench, plan
from tests.fedserver.conftest import World
from tests.fedserver.federation.test_coordinator import Server, hello, id_of, next_order, running
from tests.fedserver.federation.test_encoding import ZSTD, handed_in, orders_of
from tests.fedserver.federation.test_inline import updates_of

pytestmark = pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")

METHODS = [("fedavg", "shared"), ("fedmcsa", "attended"), ("fedtp", "generated")]


def value(bench: Bench, packed, base):
    """Return the bits of every tensor that a device makes of a change."""
    sent, held = bench.read(packed), bench.read(base)
    return dict(decoded(sent, manifest_of(sent), "zstd", manifest_of(held), held, "the server"))


@pytest.mark.parametrize(("method", "part"), METHODS)
def test_a_change_leads_from_what_was_served_before_to_what_is_served_now(tmp_path, method: str, part: str) -> None:
    tiny = Bench(tmp_path, plan(method, "vit"))
    assert tiny.engine.changes(["a", "b"], [part]) == {}, "nothing was served before the first round"
    before, first = {}, 3 if part == "attended" else 2  # a slot had no older value until its second update
    for number in (1, 2, 3, 4):
        served = tiny.engine.serve(["a", "b"])
        changes = tiny.engine.changes(["a", "b"], [part])
        assert set(changes) == ({served[name][part].digest for name in "ab"} if number >= first else set())
        for name in "ab" if number >= first else "":
            found = changes[served[name][part].digest]
            assert found.base == before[name].digest
            assert found.blob.size < served[name][part].size
            now = tiny.read(served[name][part])
            assert all(torch.equal(now[key], each) for key, each in value(tiny, found.blob, before[name]).items())
        before = {name: served[name][part] for name in "ab"}
        tiny.close(a=(number * 1e-3, 3), b=(number * 2e-3, 4))


@pytest.mark.parametrize(("method", "part"), METHODS)
def test_after_a_restart_there_is_a_change_or_none_and_never_another(tmp_path, method: str, part: str) -> None:
    """Restart: slots are kept for a round, and exist again; generated values do not."""
    tiny = Bench(tmp_path, plan(method, "vit"))
    tiny.engine.changes([], [part])
    for number in (1, 2):
        tiny.engine.serve(["a", "b"])
        tiny.close(a=(number * 1e-3, 3), b=(number * 2e-3, 4))
    tiny.engine.serve(["a", "b"])
    before = tiny.engine.changes(["a", "b"], [part])
    assert before
    tiny.restart()
    tiny.engine.serve(["a", "b"])
    assert tiny.engine.changes(["a", "b"], [part]) == ({} if part == "generated" else before)


def test_of_what_was_generated_one_round_is_kept_where_it_is_asked_for(tmp_path) -> None:
    def files(tiny: Bench) -> int:
        return len(tiny.blobs.names("serve/generated"))

    for asks, kept in ((False, 0), (True, 2)):
        tiny = Bench(tmp_path / str(asks), plan("fedtp", "vit"))
        for _ in range(3):
            tiny.engine.serve(["a", "b"])
            if asks:
                tiny.engine.changes(["a", "b"], ["generated"])
            tiny.close(a=(1e-3, 3), b=(2e-3, 4))
            assert files(tiny) == kept
    assert len(tiny.blobs.names("serve/")) == kept, "and no change stays"


def test_a_base_that_is_damaged_is_none(tmp_path) -> None:
    tiny = Bench(tmp_path, plan("fedavg", "vit"))
    tiny.engine.serve(["a"])
    before = tiny.engine.serve(["a"])["a"]["shared"]
    tiny.close(a=(1e-3, 3))
    tiny.restart()
    path = tmp_path / before.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tiny.engine.serve(["a"])
    assert tiny.engine.changes(["a"], ["shared"]) == {}
    path.unlink()
    assert tiny.engine.changes(["a"], ["shared"]) == {}


# --- orders


async def second_orders(server: Server, spoken: tuple[str, ...] = SPOKEN, inline_bytes: int = 1 << 20) -> list[list[Order]]:
    """Return the orders of two rounds for two devices."""
    streams = [server.members.connect(name, hello(inline_bytes, spoken)) for name in ("a", "b")]
    rounds = [[await next_order(stream) for stream in streams]]
    await hand_in(server, rounds[0])
    rounds.append([await next_order(stream) for stream in streams])
    return rounds


async def hand_in(server: Server, orders: list[Order]) -> None:
    for name, order, scale in zip("ab", orders, (1e-3, 2e-3), strict=True):
        held = held_by(server, order)
        data = save(encode({key: tensor + scale for key, tensor in held.items()}, "zstd", held).tensors)
        assert await updates_of(server).submit(name, handed_in(order, data, "zstd")) == Receipt()


def held_by(server: Server, order: Order):
    """Return the value that an order serves, read from the state."""
    client = id_of(order).client
    served = server.state.lab._started.serve([client])
    return read_tensors(server.blobs.open(served[client]["shared"]))


WIDE = {**ZSTD, "model": {"name": "dnn", "hidden": [64]}, "round": {**ZSTD["round"], "rounds": 3}}


async def test_the_second_order_names_the_change_from_what_the_first_one_served(world: World) -> None:
    async with running(world, WIDE) as server:
        first, second = await second_orders(server)
        for one, two in zip(first, second, strict=True):
            [before], [ref] = one.downloads, two.downloads
            assert before.base == "" and before.smaller is not None, "all of it, compressed"
            assert ref.base == before.digest and ref.smaller.data and not ref.data
            assert ref.smaller.size < before.smaller.size < before.size == ref.size
            said = two.downloads[0]
            assert (said.digest, said.base, said.smaller.digest) == (ref.digest, ref.base, ref.smaller.digest)


async def test_a_device_that_does_not_take_changes_is_served_as_before(world: World) -> None:
    async with running(world, WIDE) as server:
        for orders in await second_orders(server, ENCODINGS):
            for order in orders:
                [ref] = order.downloads
                assert (ref.encoding, ref.smaller, ref.base) == ("zstd", None, "")


async def test_whoever_was_not_served_the_last_value_is_sent_all_of_it(world: World) -> None:
    async with running(world, WIDE) as server:
        _, second = await second_orders(server)
        await server.ledger.update_device("b", fetched=-1)
        a, b = [order.downloads[0] for order in await orders_of(server, SPOKEN, 0)]
        assert a.base == second[0].downloads[0].base != ""
        assert (b.digest, b.base) == (a.digest, "") and b.smaller.encoding == "zstd"


async def test_downloads_alone_can_be_made_smaller(world: World) -> None:
    async with running(
        world, {**WIDE, "round": {"rounds": 2, "min_clients": 2, "encoding": "int8", "served": "zstd"}}
    ) as server:
        for order in await orders_of(server, SPOKEN, 0):
            assert order.downloads[0].smaller.encoding == "zstd" and order.encodings == {"shared": "int8"}


def test_changes_are_no_longer_offered_to_whoever_has_no_use_for_them(tmp_path) -> None:
    tiny = Bench(tmp_path, plan())
    new, change = (tiny.write(f"serve/{name}", {"w": torch.zeros(size)}) for name, size in (("new", 9), ("change", 1)))
    smaller, book = {new.digest: Smaller(change, "sha256:before")}, OrderBook()

    def offered(number: int, asks: str) -> None:
        book.write(OrderId("train", number, "a"), {"shared": new}, {}, 9.0, number, smaller=smaller, changes=True)
        for _ in range(3):  # a download that breaks off continues
            book.offer("a", asks)

    for number in range(1, MISSES + 1):
        offered(number, new.digest)
        assert not book.forgets("a")
    offered(9, change.digest)
    assert book.forgets("a")
    offered(10, change.digest)
    assert not book.forgets("a"), "it took one"


def test_a_part_that_the_model_lacks_has_no_changes(tmp_path) -> None:
    tiny = Bench(tmp_path, plan("fedavg", "mlr"))
    tiny.engine.serve(["a"])
    tiny.close(a=(1e-3, 3))
    tiny.engine.serve(["a"])
    assert set(tiny.engine.changes(["a"], ["shared", "attended"])) == set(tiny.engine.changes(["a"], ["shared"]))
