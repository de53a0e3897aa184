"""Names of orders, and incoming files: resumable, taken over, never outside their folder."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import LimitExceeded, OrderClosed, UnknownBlob, Unreachable, UpdateRefused, UploadTakenOver
from attune.common.exchange.messages import Notice, UploadTarget
from attune.common.plan import Profile
from attune.common.wire.blobs import Blob
from attune.common.wire.digest import digest_of, file_name
from attune.common.wire.malformed import DigestMismatch, Truncated
from attune.fedserver.core.messages import OrderId
from attune.fedserver.core.orderbook import OrderBook, needs_download
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.federation.refusals import BYTES_A_MINUTE, LINE_BYTES, ReportBudget
from attune.fedserver.federation.streams import MAX_UNSENT, Stream
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.stores.disk import DiskStorage
from attune.fedserver.stores.uploads import Uploads
from tests.raising import malformed

DATA = b"twenty bytes of data"


def target(data=DATA, **said):
    usual = {"order_id": "train-1-a", "part": "shared", "digest": digest_of(data), "size": len(data)}
    return UploadTarget(**(usual | said))


def content(folder, blob):
    return (folder / blob.name).read_bytes()


@given(
    st.sampled_from(["train", "evaluate"]),
    st.integers(0, 10**9 - 1),
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}", fullmatch=True),
)
def test_order_ids_come_back(work, number, name):
    assert OrderId.parse(str(OrderId(work, number, name)), name) == OrderId(work, number, name)


@given(st.text(max_size=40))
def test_no_other_text_is_an_order_of_this_device(text):
    try:
        order = OrderId.parse(text, "kiel")
    except UpdateRefused:
        return
    assert (order.client, text.endswith("-kiel")) == ("kiel", True)


@pytest.mark.parametrize(
    "text", ["train-1-other", "train-1-", "train--kiel", "train-1-kiel-", "TRAIN-1-kiel", "train-1234567890-kiel"]
)
def test_orders_of_others_and_impossible_ones_are_refused(text):
    with pytest.raises(UpdateRefused):
        OrderId.parse(text, "kiel")


def test_the_book_knows_the_newest_order_of_each_device():
    book = OrderBook()
    book.write(OrderId("train", 1, "a"), {}, {"shared": ""}, 10.0, 0)
    assert list(book.order("a", "train-1-a").returns) == ["shared"]
    book.write(OrderId("train", 2, "a"), {}, {}, 10.0, 1)
    for name, order in (("a", "train-1-a"), ("b", "train-2-b")):
        with pytest.raises(OrderClosed):
            book.order(name, order)
    with pytest.raises(UpdateRefused):
        book.order("b", "train-2-a")
    with pytest.raises(UnknownBlob):
        book.offer("a", "0" * 64)


def test_blobs_of_closed_orders_are_withdrawn(tmp_path):
    """A device that is not asked any more could fetch a removed file, and the log called the home damaged."""
    book, blob = OrderBook(), Blob("state/shared.value.1.safetensors", "sha256:" + "0" * 64, 8)
    book.write(OrderId("train", 1, "a"), {"shared": blob}, {"shared": ""}, 10.0, 0)
    assert book.offer("a", blob.digest) == blob
    book.withdraw()
    with pytest.raises(UnknownBlob):
        book.offer("a", blob.digest)
    book.write(OrderId("train", 2, "b"), {"shared": blob}, {"shared": ""}, 10.0, 1)
    assert book.offer("b", blob.digest) == blob


def device(contributed, fetched):
    return DeviceRecord("a", "", samples=1, contributed=contributed, fetched=fetched)


@pytest.mark.parametrize(
    ("contributed", "fetched", "work", "train", "evaluate", "expected"),
    [
        (0, -1, "train", "all", "trained", True),  # never served
        (0, 0, "train", "sampled", "served", True),
        (0, 0, "train", "all", "trained", False),  # it starts from its own state
        (2, 1, "train", "all", "trained", True),  # its update of round 2 has no receipt yet
        (2, 2, "train", "all", "trained", False),
        (2, 1, "evaluate", "all", "trained", False),  # judged by its own model
        (2, 2, "evaluate", "sampled", "served", True),
    ],
)
def test_who_starts_from_what_is_served(contributed, fetched, work, train, evaluate, expected):
    assert needs_download(device(contributed, fetched), work, train, evaluate) is expected


def test_an_upload_goes_on_after_a_restart_and_is_taken_when_whole(tmp_path):
    uploads = Uploads(DiskStorage(tmp_path))
    sink = uploads.sink("a", target(), 100)
    uploads.write("a", "shared", sink, [DATA[:5]])
    sink.close()  # as at the end of the process
    again = Uploads(DiskStorage(tmp_path))
    assert again.offset("a", target()) == 5
    sink = again.sink("a", target(), 100)
    with pytest.raises(Truncated):
        again.complete("a", "shared", sink)
    with pytest.raises(UnknownBlob):
        again.take("a", "shared", target().digest)
    again.write("a", "shared", sink, [DATA[5:]])
    again.complete("a", "shared", sink)
    assert content(tmp_path, again.take("a", "shared", target().digest)) == DATA
    assert again.offset("a", target()) == len(DATA)


def test_a_newer_stream_takes_over_and_the_older_one_hears_it(tmp_path):
    uploads = Uploads(DiskStorage(tmp_path))
    older = uploads.sink("a", target(), 100)
    uploads.write("a", "shared", older, [DATA[:5]])
    newer = uploads.sink("a", target(), 100)
    assert newer.offset == 5
    for call in (lambda: uploads.write("a", "shared", older, [DATA[5:]]), lambda: uploads.complete("a", "shared", older)):
        with pytest.raises(UploadTakenOver):
            call()
    uploads.write("a", "shared", newer, [DATA[5:]])
    uploads.complete("a", "shared", newer)


def test_take_overs_in_the_midst_of_writes_never_mix_bytes(tmp_path):
    """Run four streams of one upload at once, each from the file's present end: one completes it, the others are closed."""
    data = bytes(range(256)) * 64
    uploads, whole, done = Uploads(DiskStorage(tmp_path)), target(data), []

    def stream(_):
        for _ in range(200):
            try:
                sink = uploads.sink("a", whole, len(data))
                for at in range(sink.offset, len(data), 16):
                    uploads.write("a", "shared", sink, [data[at : at + 16]])
                uploads.complete("a", "shared", sink)
            except UploadTakenOver:
                continue
            done.append(True)
            return

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(stream, range(4)))
    assert done
    assert content(tmp_path, uploads.take("a", "shared", whole.digest)) == data


def test_another_digest_of_the_same_part_replaces_the_old_file(tmp_path):
    uploads, other = Uploads(DiskStorage(tmp_path)), target(b"other")
    uploads.write("a", "shared", uploads.sink("a", target(), 100), [DATA])
    uploads.sink("a", other, 100)
    assert {path.name for path in (tmp_path / "uploads" / "a").iterdir()} == {f"shared.{file_name(other.digest)}"}


def test_wrong_bytes_sizes_parts_and_digests_are_refused(tmp_path):
    uploads = Uploads(DiskStorage(tmp_path))
    sink = uploads.sink("a", target(), 100)
    uploads.write("a", "shared", sink, [DATA[::-1]])
    with pytest.raises(DigestMismatch):
        uploads.complete("a", "shared", sink)
    assert uploads.offset("a", target()) == 0
    for size in (101, -1):
        with pytest.raises(LimitExceeded):
            uploads.sink("a", target(size=size), 100)
    with pytest.raises(UpdateRefused):
        uploads.sink("a", target(part="../ca"), 100)
    with malformed("bad-digest"):
        uploads.take("a", "shared", "../" * 20 + "etc")


async def test_a_device_that_does_not_read_is_cut_off():
    stream = Stream("a", Profile("tabular", (1,), [0], 1, 1))
    for _ in range(MAX_UNSENT + 1):
        stream.send(Notice("hello?"))
    with pytest.raises(Unreachable, match="does not read"):
        await stream.next()
    stream.send(Notice("nobody hears this"))


async def test_a_closed_stream_ends_with_its_first_error():
    stream = Stream("a", Profile("tabular", (1,), [0], 1, 1))
    stream.send(Notice("dropped"))
    stream.close(OrderClosed("first"))
    stream.close(UpdateRefused("second"))
    with pytest.raises(OrderClosed, match="first"):
        await stream.next()


def test_a_complete_upload_that_is_damaged_is_to_be_sent_again(tmp_path):
    uploads = Uploads(DiskStorage(tmp_path))
    sink = uploads.sink("a", target(), 100)
    uploads.write("a", "shared", sink, [DATA])
    uploads.complete("a", "shared", sink)
    [path] = (tmp_path / "uploads" / "a").iterdir()
    path.write_bytes(DATA[::-1])
    storage = DiskStorage(tmp_path)
    again, [blob] = Uploads(storage), storage.spool.all_sealed()
    with pytest.raises(Damaged, match=f"{path} is damaged"):
        storage.blobs.check(blob)
    with pytest.raises(UnknownBlob, match=r"damaged.*upload it again"):
        again.take("a", "shared", target().digest)
    assert again.offset("a", target()) == 0


# --- budget of what a device makes the server write: within a minute, and in the minute after

LONG = "x" * (1000 - LINE_BYTES)  # a report that counts 1,000 bytes


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_device_above_its_budget_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="fedserver")
    budget, within = ReportBudget(), BYTES_A_MINUTE // 1000
    written = [budget.allows("eve", LONG, number * 0.1) for number in range(within + 7)]
    assert written == [True] * within + [False] * 7
    assert len(said(caplog)) == 1 and "eve reports more than" in said(caplog)[0], "one line for all that is left out"
    assert budget.allows("ada", LONG, 20.0), "another device has a budget of its own"
    assert budget.allows("ada", "short", 60.0)
    assert said(caplog)[1:] == ["eve: 7 reports were left out"]
    assert budget.allows("eve", LONG, 61.0), "the next minute is another one"
