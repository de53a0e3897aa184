"""Parts in lossy encodings: requested, checked, and aggregated in the dtypes of the part."""

from collections.abc import Sequence

import pytest
import torch
from safetensors.torch import save

from attune.common.errors import SettingError, UpdateRefused
from attune.common.exchange.encodings import decoded, encode
from attune.common.exchange.messages import BlobRef, Order, Receipt, Update
from attune.common.protocol import EMBEDDING, ENCODINGS, SAME_COHORT, SPOKEN
from attune.common.wire.digest import digest_of
from attune.common.wire.files import read_tensors
from attune.common.wire.malformed import Malformed
from attune.common.wire.tensors import Tensors, manifest_of
from attune.fedserver.core import orderbook
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.ports.blobs import UPLOADS
from tests.fedserver.bench import Bench, plan
from tests.fedserver.conftest import World
from tests.fedserver.federation.test_coordinator import Server, hello, next_order, running
from tests.fedserver.federation.test_inline import update, updates_of

SETTINGS = {
    "method": {"name": "fedavg"},
    "model": {"name": "mlr"},
    "round": {"rounds": 2, "min_clients": 2, "encoding": "bf16"},
}


async def test_the_order_asks_for_it_and_an_update_in_another_encoding_is_refused(world: World) -> None:
    async with running(world, SETTINGS) as server:
        order, _ = await orders_of(server)
        assert (order.returns, order.encodings) == (("shared",), {"shared": "bf16"})
        with pytest.raises(UpdateRefused, match="in another encoding than its order asks for"):
            await updates_of(server).submit("a", update(order, order.downloads[0].data))


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "fedtp"])
def test_the_next_state_is_that_of_the_decoded_updates(tmp_path, method: str) -> None:
    """Aggregate float32 tensors with the values of the bfloat16 ones; the state stays float32."""
    states = []
    for encoding in ("bf16", ""):
        tiny = Bench(tmp_path / (encoding or "full"), plan(method, "vit"))
        tiny.engine.serve(["a", "b"])
        generator = torch.Generator().manual_seed(7)
        entries = {}
        for client in ("a", "b"):
            parts = {}
            for part, manifest in sorted(tiny.engine.manifests.items()):
                exact = {name: torch.randn(spec.shape, generator=generator) for name, spec in manifest.items()}
                written = encode(exact, "bf16").tensors
                if not encoding:
                    written = {name: tensor.float() for name, tensor in written.items()}
                parts[part] = tiny.write(f"inbox/{client}/{part}", written)
                tiny.engine.arrive(client, part, parts[part], "bf16", max_norm=1e9)
            entries[client] = AcceptedUpdate(Report(round=1, work="train", client=client, samples=3), parts)
        outcome = tiny.engine.aggregate(entries)
        states.append([(slot.part, slot.key, slot.digest) for slot in outcome.slots])
    assert states[0] == states[1]


INT8 = {**SETTINGS, "round": {"rounds": 2, "min_clients": 2, "encoding": "int8"}}


def handed_in(order: Order, data: bytes, encoding: str = "int8") -> Update:
    ref = BlobRef("shared", digest_of(data), len(data), 0, encoding, data)
    return Update(order.id, (ref,), 10, b"{}")


def served(server: Server, order: Order) -> Tensors:
    return read_tensors(server.blobs.open(server.state.book.offer("a", order.downloads[0].digest)))


async def orders_of(server: Server, spoken: Sequence[str] = ENCODINGS, inline_bytes: int = 1 << 20) -> list[Order]:
    streams = [server.members.connect(name, hello(inline_bytes, spoken)) for name in ("a", "b")]
    return [await next_order(stream) for stream in streams]


async def test_what_is_kept_of_a_change_are_the_values_that_it_leads_to(world: World) -> None:
    """Keep served + change in the part's own dtypes. The received bytes are counted, and then deleted."""
    async with running(world, INT8) as server:
        order, _ = await orders_of(server)
        before = served(server, order)
        trained = {name: tensor + torch.randn(tensor.shape) for name, tensor in before.items()}
        written = encode(trained, "int8", before)
        data = save(written.tensors)
        assert await updates_of(server).submit("a", handed_in(order, data)) == Receipt()
        [entry] = server.state.inbox.entries("train", 1).values()
        assert entry.row.bytes_up == len(data)
        kept = read_tensors(server.blobs.open(entry.parts["shared"]))
        assert {name: tensor.dtype for name, tensor in kept.items()} == {name: each.dtype for name, each in before.items()}
        for name, tensor in kept.items():
            assert torch.equal(trained[name] - tensor, written.errors[name])
        assert server.blobs.names(UPLOADS) == []


async def test_the_limit_on_a_change_is_of_the_values_that_it_leads_to(world: World) -> None:
    async with running(world, {**INT8, "server": {"max_update_norm": 1.0}}) as server:
        order, _ = await orders_of(server)
        before = served(server, order)
        for change, fits in ((1e3, False), (1e-3, True)):
            written = encode({name: tensor + change for name, tensor in before.items()}, "int8", before).tensors
            submitted = updates_of(server).submit("a", handed_in(order, save(written)))
            if fits:
                assert await submitted == Receipt()
            else:
                with pytest.raises(UpdateRefused, match="the limit is 1"):
                    await submitted


async def test_whole_numbers_are_not_taken_for_values(world: World) -> None:
    """Hand in int8 tensors for an order without that encoding: they must not be aggregated as weights."""
    async with running(world, {**SETTINGS, "round": {"rounds": 2, "min_clients": 2}}) as server:
        order, _ = await orders_of(server)
        written = encode(served(server, order), "int8").tensors
        with pytest.raises(Malformed) as caught:
            await updates_of(server).submit("a", handed_in(order, save(written), ""))
        assert caught.value.kind == "unexpected-tensor"


def test_a_device_that_is_served_nothing_hands_in_plain_values() -> None:
    """Serve no values: the device starts from its own state, so there is no common base for a change."""
    for encoding, expected in (("int8", ["int8", ""]), ("bf16", ["bf16", "bf16"]), ("", ["", ""])):
        settings = resolve({**SETTINGS, "round": {"encoding": encoding}})
        assert [settings.encodings.asked("shared", served) for served in (True, False)] == expected


ZSTD = {**SETTINGS, "round": {"rounds": 2, "min_clients": 2, "encoding": "zstd"}}
needs_zstd = pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")


def unpacked_of(server: Server, order: Order) -> Tensors:
    """Return the tensors that the order serves, from the bytes that it offers."""
    [ref] = order.downloads
    sent = read_tensors(server.blobs.open(server.state.book.offer("a", ref.digest)))
    manifest = server.state.lab._started.manifests["shared"]
    return dict(decoded(sent, manifest_of(sent), ref.encoding, manifest, None, "the server")) if ref.encoding else sent


@needs_zstd
async def test_what_is_served_is_sent_in_fewer_bytes_and_every_bit_comes_back(world: World) -> None:
    async with running(world, ZSTD) as server:
        order, _ = await orders_of(server)
        before = unpacked_of(server, order)
        trained = {name: tensor + torch.randn(tensor.shape) * 1e-3 for name, tensor in before.items()}
        data = save(encode(trained, "zstd", before).tensors)
        assert await updates_of(server).submit("a", handed_in(order, data, "zstd")) == Receipt()
        [entry] = server.state.inbox.entries("train", 1).values()
        kept = read_tensors(server.blobs.open(entry.parts["shared"]))
        assert all(torch.equal(kept[name], tensor) for name, tensor in trained.items())
        assert entry.row.bytes_up == len(data)


@needs_zstd
def test_what_is_smaller_is_sent_in_its_place_and_what_is_not_stays(tmp_path) -> None:
    tiny = Bench(tmp_path, plan())
    wide = tiny.write("serve/wide", {"w": torch.randn(4096)})
    tight = tiny.write("serve/tight", {"w": torch.randn(1)})
    found = tiny.engine.pack([wide, tight, wide])
    assert list(found) == [wide.digest] and found[wide.digest].size < wide.size
    assert tiny.engine.pack([wide]) == found, "it is made once"
    sent = tiny.read(found[wide.digest])
    [tensor] = decoded(sent, manifest_of(sent), "zstd", manifest_of(tiny.read(wide)), None, "the server").values()
    assert torch.equal(tensor, tiny.read(wide)["w"])
    tiny.engine.settle()
    assert tiny.blobs.names("serve/") == ["serve/tight", "serve/wide"], "and goes with the state"


def test_a_server_that_cannot_read_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orderbook, "ENCODINGS", ("bf16", "int8"))
    with pytest.raises(SettingError, match=r"needs the package zstandard: install attune-fl\[zstd\]"):
        resolve({**SETTINGS, "round": {"encoding": "zstd"}})


@needs_zstd
async def test_a_device_without_the_package_is_told_to_install_it(world: World) -> None:
    async with running(world, ZSTD) as server:
        with pytest.raises(SettingError, match=r"a cannot write parts as zstd .*install zstandard beside it"):
            server.members.connect("a", hello(0, ("bf16", "int8")))


# --- each part in its own

TWO_PARTS = {
    "method": {"name": "fedtp"},
    "round": {"rounds": 2, "min_clients": 2, "encoding": "bf16", "encodings": {"generated": "int8"}},
}


def test_a_part_can_have_an_encoding_of_its_own() -> None:
    settings = resolve(TWO_PARTS)
    assert settings.encodings.handed_in == {"generated": "int8", "shared": "bf16"}
    assert [settings.encodings.asked("generated", served) for served in (True, False)] == ["int8", ""]
    plain = resolve({**TWO_PARTS, "round": {"encoding": "bf16", "encodings": {"shared": ""}}})
    assert plain.encodings.handed_in == {"generated": "bf16", "shared": ""}


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        ("generatd", r"round.encodings.generatd: .*did you mean 'generated'"),
        ("private", r"round.encodings.private: this method hands in no such part \(known: generated, shared\)"),
        ("local", r"round.encodings.local: .*\(known: generated, shared\)"),
    ],
)
def test_a_part_that_the_method_does_not_have_is_named(part: str, answer: str) -> None:
    with pytest.raises(SettingError, match=answer):
        resolve({**TWO_PARTS, "round": {"encodings": {part: "int8"}}})


def test_an_encoding_of_a_part_that_is_none_is_named() -> None:
    with pytest.raises(SettingError, match=r"round\.encodings.*Invalid enum value 'int4'"):
        resolve({**TWO_PARTS, "round": {"encodings": {"generated": "int4"}}})


@pytest.mark.parametrize(
    ("known", "answer"),
    [
        ((), r"a cannot write parts as bf16 \(round.encodings of this federation\): update fedclient"),
        (("bf16",), r"a cannot write parts as int8 \(round.encodings of this federation\): update fedclient"),
        (("bf16", "int8"), r"a cannot write each part in its own encoding .*: update fedclient"),
        (("bf16", "int8", "per-part"), ""),
    ],
)
def test_a_device_must_know_each_of_them_and_keep_them_apart(known: tuple[str, ...], answer: str) -> None:
    encodings = resolve(TWO_PARTS).encodings
    if not answer:
        encodings.check_device("a", known)
        return
    with pytest.raises(SettingError, match=answer):
        encodings.check_device("a", known)


def test_an_older_device_that_knows_the_one_encoding_of_all_parts_is_let_in() -> None:
    resolve({**TWO_PARTS, "round": {"encoding": "bf16"}}).encodings.check_device("a", ("bf16",))
    resolve({**TWO_PARTS, "round": {}}).encodings.check_device("a", ())


@needs_zstd
def test_a_device_that_cannot_read_what_is_served_is_refused() -> None:
    with pytest.raises(SettingError, match=r"zstd \(round.served of this federation\): .*install zstandard beside it"):
        resolve({**TWO_PARTS, "round": {"served": "zstd"}}).encodings.check_device("a", ("bf16", "int8"))


async def test_orders_ask_for_an_encoding_of_each_part_and_swapped_ones_are_refused(world: World) -> None:

    method = {"name": "custom", "parts": {"@head": "attended", "*": "shared"}}
    async with running(
        world, {"method": method, "model": {"name": "dnn"}, "round": {**TWO_PARTS["round"], "encodings": {"attended": "int8"}}}
    ) as server:
        order, _ = await orders_of(server, SPOKEN)
        asked = dict(order.encodings)
        assert asked == {"attended": "int8", "shared": "bf16"}
        swapped = zip(asked, reversed(asked.values()), strict=True)
        refs = tuple(BlobRef(part, digest_of(b""), 0, 0, encoding) for part, encoding in swapped)
        with pytest.raises(UpdateRefused, match=r"\['attended', 'shared'\] in another encoding"):
            await updates_of(server).submit("a", Update(order.id, refs, 10, b"{}"))


@pytest.mark.parametrize("setting", ["same_cohort", "secure_spare"])
async def test_an_older_device_is_refused_where_it_must_know_more_of_secure_sums(world: World, setting: str) -> None:

    privacy = {"secure_aggregation": True, setting: 2 if setting == "secure_spare" else True}
    async with running(world, {"method": {"name": "fedavg"}, "privacy": privacy}) as server:
        older = (*(word for word in SPOKEN if word != SAME_COHORT), "transform:secure-sum-4")
        with pytest.raises(SettingError, match=r"^old knows no privacy.same_cohort or secure_spare of this federation: update"):
            server.members.connect("old", hello(1 << 20, older))
        server.members.connect("new", hello(1 << 20, (*older, SAME_COHORT)))


async def test_a_device_that_cannot_keep_its_embedding_is_refused_before_round_1(world: World) -> None:
    async with running(world, {"method": {"name": "pfedhn", "embedding": "device"}, "model": {"name": "mlr"}}) as server:
        older = tuple(word for word in SPOKEN if word != EMBEDDING)
        with pytest.raises(SettingError, match=r"^old cannot keep its embedding \(method.embedding of this federation\)"):
            server.members.connect("old", hello(1 << 20, older))
        order, _ = await orders_of(server, SPOKEN)
        assert ([ref.part for ref in order.downloads], dict(order.counted)) == (["generated"], {})
