"""Workers that read updates from S3 and write the next state there: the bits of one process, and no tensor in the server."""

import logging
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from attune.common import aio
from attune.common.errors import LedgerBusy
from attune.common.exchange.transform import PartUpdate
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.header import layout_of
from attune.common.wire.tensors import Cast, bytes_of, manifest_of
from attune.features.cluster.workers import StoredRound
from attune.fedserver.lab.checks import BoundedTensors, RebasedTensors
from attune.fedserver.lab.vault import NotFinite
from attune.fedserver.ports.blobs import Damaged
from tests import engines
from tests.features.cluster.conftest import SHAPES, Played, draw, rounds, update
from tests.features.cluster.inline_cluster import InlineCluster
from tests.features.cluster.test_lab import run
from tests.fedserver.ports.test_lab import METHODS

pytest.importorskip("psycopg")
pytest.importorskip("obstore")

from attune.features.remote.s3_objects import S3Objects
from attune.features.remote.storage import RemoteStorage
from attune.fedserver.stores.checked_blobs import OBJECTS

pytestmark = pytest.mark.engines
SIZE = sum(tensor.nbytes for tensor in draw(0).values())  # bytes of one client's values


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[RemoteStorage]:
    made = engines.remote_storage(tmp_path)
    made.create()
    yield made
    aio.run(made.close())


class InStore(Played):
    """An aggregator whose updates and state are in S3. The server's cache has none of them when a round is closed."""

    def __init__(self, storage: RemoteStorage, aggregator: str, given: Mapping[str, Any], pool: Any, **more: Any) -> None:
        self.storage = storage
        super().__init__(aggregator, given, pool, blobs=storage.blobs, **more)

    def stored(self, number: int, update_: PartUpdate) -> PartUpdate:
        """Return an update as the engine has it: lazy, and in the dtypes of the part."""
        create = partial(self.blobs.create, f"inbox/train-{number}-{update_.client}/part.safetensors")
        blob = write_tensors(create, update_.tensors)
        self.storage.blobs._cache.drop(sorted(self.storage.blobs._objects.keys(OBJECTS)))
        return replace(update_, tensors=Cast(TensorFile(self.blobs.open(blob)), manifest_of(update_.tensors)))

    def play(self, number: int, samples: Mapping[str, float]) -> dict[str, float]:
        return self.aggregator.close_round([self.stored(number, update(number, name, m)) for name, m in samples.items()])


@pytest.mark.parametrize("workers", [2])
def test_any_number_of_workers_gives_the_bits_of_one_process(kind, new_pool, storage, workers):
    pool, cluster = new_pool(workers)
    alone, spread = Played(*kind), InStore(storage, *kind, pool)
    for number, samples in enumerate(rounds()):
        assert spread.play(number, samples) == alone.play(number, samples)
        assert spread.commit() == alone.commit()
    assert pool.usable and {method for _, method, _ in cluster.calls} <= {"versions", "whole", "sums", "values", "assemble"}
    for client in ("ann", "cyd", "nobody"):
        mine, theirs = spread.served(client), alone.served(client)
        assert all(torch.equal(mine[name], theirs[name]) for name in SHAPES)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_bits_of_the_lab_of_one_process(method: str, storage: RemoteStorage) -> None:
    cluster = InlineCluster(2)
    assert run(method, cluster, storage) == run(method, None)
    asked = {name for _, name, _ in cluster.calls}
    assert not cluster.closed and not asked & {"partial", "apply"} and "assemble" in asked


@pytest.mark.parametrize("aggregator", ["mean", "attention", "amp"])
def test_of_the_bytes_only_headers_pass_through_the_server(aggregator, new_pool, storage, monkeypatch):
    sizes = {"initial": {name: torch.zeros(400, 500) for name in ("a", "b", "c")}}
    components = {name: [name] for name in "abc"}
    pool, cluster = new_pool(2)
    played = InStore(storage, aggregator, {}, pool, components=components, **sizes)
    cohort = [PartUpdate(f"c{i}", 1, {name: torch.randn(400, 500) for name in "abc"}) for i in range(4)]
    updates = [played.stored(1, one) for one in cohort]
    passed = {"in": 0, "out": 0}
    read, write = S3Objects.range, S3Objects.write
    mine = storage.blobs._objects

    def counted_read(self: S3Objects, key: str, start: int, length: int) -> memoryview:
        passed["in"] += length if self is mine else 0
        return read(self, key, start, length)

    def counted_write(self: S3Objects, key: str, content: Any) -> bool:
        size = content.stat().st_size if isinstance(content, Path) else len(content)
        passed["out"] += size if self is mine else 0
        return write(self, key, content)

    monkeypatch.setattr(S3Objects, "range", counted_read)
    monkeypatch.setattr(S3Objects, "write", counted_write)
    monkeypatch.setattr(S3Objects, "pieces", lambda *_: pytest.fail("the server reads a whole object"))
    played.aggregator.close_round(updates)
    assert passed["in"] <= 6 * (1 << 16) and passed["out"] < 1 << 16  # heads of files, and the matrices of weights
    assert sum(len(value) for _, _, arguments in cluster.calls for value in arguments if isinstance(value, bytes)) == 0
    assert not storage.blobs._cache.has(storage.blobs._found(played.vault.staged_slots()[0].file) or "")
    played.commit()
    monkeypatch.undo()
    assert not [key for key in mine.keys(OBJECTS) if "piece" in key], "pieces go with the round"
    storage.blobs.sweep()
    assert set(played.served("c0")) == set("abc")


def test_bounded_and_rebased_updates_have_the_same_bits(new_pool, storage):
    alone, spread = Played("mean", {}), InStore(storage, "mean", {}, new_pool(2)[0])
    for played in (alone, spread):
        updates = [update(1, name, 3.0) for name in ("ann", "bob", "cyd")]
        if played is spread:
            lazy = [spread.stored(1, one) for one in updates]
            present = played.vault.read("value")
        else:
            blobs = [write_tensors(partial(alone.blobs.create, f"inbox/{one.client}"), one.tensors) for one in updates]
            lazy = [
                replace(one, tensors=Cast(TensorFile(alone.blobs.open(blob)), manifest_of(one.tensors)))
                for one, blob in zip(updates, blobs, strict=True)
            ]
            present = played.vault.read("value")
        lazy[0] = replace(lazy[0], tensors=BoundedTensors(lazy[0].source, present, 0.25))  # type: ignore[arg-type]
        lazy[1] = replace(lazy[1], tensors=RebasedTensors(lazy[1].source, present, 0.5))  # type: ignore[arg-type]
        played.aggregator.close_round(lazy)
    assert spread.pool.usable
    assert spread.commit() == alone.commit()


def test_sums_and_what_another_package_computes_stay_in_the_server(new_pool, storage):
    """Send no lazy tensors of unknown kinds: those of client-level privacy come from a secret."""

    class Other(Cast):
        """A view that workers do not know."""

    updates = [update(1, name, 1) for name in ("ann", "bob")]
    alone = Played("mean", {"robust": "median"})
    alone.aggregator.close_round(updates)
    digests = alone.commit()
    for lazy in (False, True):
        pool, cluster = new_pool(2)
        spread = InStore(storage, "mean", {"robust": "median"}, pool)
        stored = [spread.stored(1, one) for one in updates]
        others = [replace(one, tensors=Other(one.source, one.source.manifest)) for one in stored]
        spread.aggregator.close_round(others if lazy else updates)
        assert spread.commit() == digests
        assert {method for _, method, _ in cluster.calls} == {"versions", "partial"}


@pytest.mark.parametrize("every", [2, 5])
def test_a_worker_that_dies_is_replaced_and_its_step_done_again(kind, new_pool, storage, every):
    calls = 0

    def dies(call: Any) -> bool:
        nonlocal calls
        calls += call[1] != "versions"
        return call[1] != "versions" and calls % every == 0

    pool, cluster = new_pool(2, dies=dies)
    alone, spread = Played(*kind), InStore(storage, *kind, pool)
    for number, samples in enumerate(rounds()[:2]):
        assert spread.play(number, samples) == alone.play(number, samples)
        assert spread.commit() == alone.commit()
    assert pool.usable and len(cluster.workers) > 2


@pytest.mark.parametrize("method", ["whole", "sums", "values", "assemble"])
def test_where_the_cluster_ends_the_server_does_the_round_by_itself(method, new_pool, storage, caplog):
    pool, _ = new_pool(2, starts=2, dies=lambda call: call[1] == method)
    aggregator = "attention" if method in ("whole", "assemble") else "amp"
    alone, spread = Played(aggregator, {}), InStore(storage, aggregator, {}, pool)
    with caplog.at_level(logging.WARNING):
        for number, samples in enumerate(rounds()[:2]):
            assert spread.play(number, samples) == alone.play(number, samples)
            assert spread.commit() == alone.commit()
    assert not pool.usable and caplog.text.count("is not used any more") == 1
    spread.blobs.remove(spread.blobs.names("inbox/"))
    assert len(list(storage.blobs._objects.keys(OBJECTS))) <= len(spread.blobs.names("state/"))


def test_what_is_not_finite_is_refused_as_in_one_process_and_the_cluster_stays(new_pool, storage):
    pool, _ = new_pool(2)
    spread = InStore(storage, "attention", {}, pool)
    largest = {name: torch.full_like(tensor, 3e38) for name, tensor in draw(1).items() if tensor.dtype == torch.float32}
    updates = [PartUpdate(name, 1, draw(1) | largest) for name in ("ann", "bob")]  # their mean would be the sum of changes
    with pytest.raises(NotFinite, match="would not be finite"):
        spread.aggregator.close_round([spread.stored(1, one) for one in updates])
    spread.vault.take_back()
    spread.reopen()
    assert pool.usable
    spread.play(2, {"ann": 1, "bob": 1})


@pytest.mark.parametrize(("error", "raised"), [("lost", Damaged), ("busy", LedgerBusy)])
def test_a_lost_object_and_a_store_that_fails_are_named_and_the_cluster_stays(error, raised, new_pool, storage, monkeypatch):
    pool, _ = new_pool(2)
    spread = InStore(storage, "mean", {}, pool)
    updates = [spread.stored(1, update(1, name, 1)) for name in ("ann", "bob")]
    if error == "lost":
        key, _ = storage.blobs._found("inbox/train-1-bob/part.safetensors") or ("", None)
        storage.blobs._objects.remove([key])
    else:

        def fails(*_: object) -> bool:
            raise LedgerBusy("S3 cannot be used now")

        monkeypatch.setattr(S3Objects, "write", fails)
    with pytest.raises(raised):
        spread.aggregator.close_round(updates)
    assert pool.usable


def change_object(storage: RemoteStorage, name: str, change: Callable[[bytearray], object]) -> None:
    """Put other bytes in the place of those of a blob, past the server."""
    objects = storage.blobs._objects
    key, _ = storage.blobs._found(name) or ("", None)
    data = bytearray(objects.read(key))
    change(data)
    objects.remove([key])
    assert objects.write(key, bytes(data))


def flip_the_last_byte(data: bytearray) -> None:
    data[-1] ^= 1


def take_those_of_another(data: bytearray) -> None:
    """Take the bytes of a sound blob with the same header."""
    other = draw(77)
    data[-SIZE:] = b"".join(bytes_of(other[name]) for name in layout_of(manifest_of(other)).manifest)


@pytest.mark.parametrize("change", [flip_the_last_byte, take_those_of_another, lambda data: data.pop(), bytearray.clear])
@pytest.mark.parametrize("aggregator", ["mean", "attention", "amp"])
def test_a_damaged_or_exchanged_update_is_named_and_nothing_is_staged(aggregator, change, new_pool, storage):
    pool, _ = new_pool(2)
    spread = InStore(storage, aggregator, {}, pool)
    updates = [spread.stored(1, update(1, name, 1)) for name in ("ann", "bob", "cyd")]
    change_object(storage, "inbox/train-1-bob/part.safetensors", change)
    with pytest.raises(Damaged, match=r"inbox/train-1-bob/part\.safetensors is damaged in s3://") as caught:
        spread.aggregator.close_round(updates)
    assert caught.value.name == "inbox/train-1-bob/part.safetensors"
    assert pool.usable and spread.vault.staged_slots() == []


@pytest.mark.parametrize("aggregator", ["attention", "amp"])
def test_a_damaged_present_value_is_named_and_nothing_is_staged(aggregator, new_pool, storage):
    pool, _ = new_pool(2)
    spread = InStore(storage, aggregator, {}, pool)
    for number in (1, 2):
        spread.play(number, {"ann": 1, "bob": 2})
        spread.commit()
    updates = [spread.stored(3, update(3, name, 1)) for name in ("ann", "bob")]
    (slot,) = [one for one in spread.slots.values() if one.key == spread.aggregator.slot("ann")]
    change_object(storage, f"state/{slot.file}", flip_the_last_byte)
    with pytest.raises(Damaged, match="is damaged in s3://") as caught:
        spread.aggregator.close_round(updates)
    assert caught.value.name == f"state/{slot.file}"
    assert spread.vault.staged_slots() == []


def test_a_damaged_piece_is_made_again(new_pool, storage, monkeypatch):
    pool, _ = new_pool(2)
    alone, spread = Played("attention", {}), InStore(storage, "attention", {}, pool)
    write = S3Objects.write
    with monkeypatch.context() as patch:
        patch.setattr(
            S3Objects,
            "write",
            lambda self, key, content: write(self, key, content[:-1] + b"?" if "piece" in key else content),
        )
        with pytest.raises(LedgerBusy, match="a piece of the next state has other bytes than were written"):
            spread.play(1, {"ann": 1, "bob": 2})
    spread.vault.take_back()
    alone.play(1, {"ann": 1, "bob": 2})
    spread.play(1, {"ann": 1, "bob": 2})
    assert spread.commit() == alone.commit()


def test_what_travels_has_no_keys_and_shows_none(new_pool, storage):
    pool, cluster = new_pool(1)
    spread = InStore(storage, "attention", {}, pool)
    spread.play(1, {"ann": 1, "bob": 2})
    access = storage.blobs.shared
    assert access.variables["AWS_SECRET_ACCESS_KEY"] == engines.SECRET and engines.SECRET not in repr(access)
    (round_,) = [shared for shared in cluster.shared if isinstance(shared, StoredRound)]
    assert round_.ranges.objects is not None and deepcopy(round_).ranges.objects is None  # a copy is made as a message is
    assert all(arguments[0] == access for _, method, arguments in cluster.calls if method != "versions")
