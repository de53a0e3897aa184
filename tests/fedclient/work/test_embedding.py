"""A device's own embedding in its orders: durable with them, and the same after a death at each step."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from attune.common import faults
from attune.common.config import TrainSettings
from attune.common.errors import HomeMismatch, LimitExceeded
from attune.common.exchange.messages import BlobRef, Order
from attune.common.methods.hypernetwork import heads_of, initialise, on_wire
from attune.common.methods.registry import configured_in
from attune.common.methods.settings.aggregators import HypernetworkSettings
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import components_by_part, tensors_of
from attune.common.plan import Plan
from attune.common.wire.files import read_tensors
from attune.common.wire.tensors import Tensors
from attune.fedclient.data.prepare import prepare
from attune.fedclient.work.embedding import PART, EmbeddingSource, embedding_of
from attune.fedclient.work.executor import Work
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.state import FolderOrders
from tests.fedclient.work.test_learner import images_in

OPTIONS = {"embedding": "device", "embedding_dim": 4, "hidden": 6}
SPEC = default_spec("images", (8, 8, 1), 2, 0, "vit", {})
PLAN = Plan("f", 3, SPEC, [0, 1], "fedtp", OPTIONS, TrainSettings(lr=0.05, batch_size=4, local_epochs=1))
STEPS = ("training", "trained", "state-written", "order-committed")


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faults.arm("")


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], Learner]:
    prepared = prepare(images_in(tmp_path / "images"), PLAN)

    def learner(home: str) -> Learner:
        path = tmp_path / home
        path.mkdir(exist_ok=True)
        if not (path / "secret").exists():
            (path / "secret").write_bytes(bytes(range(32)))  # the same one in each home of a test
        orders = FolderOrders(path, "kiel")
        return Learner(PLAN, prepared, "kiel", orders, torch.device("cpu"), source=EmbeddingSource(orders.secret))

    return learner


def served(number: int) -> dict[str, Tensors]:
    """Return the blobs of a round, by part."""
    model = build(SPEC, PLAN.seed)
    part_of = {name: "generated" if "qkv" in name else "shared" for name in tensors_of(model)}
    values = {part: {n: t for n, t in tensors_of(model).items() if part_of[n] == part} for part in ("shared", PART)}
    settings = HypernetworkSettings(embedding="device", embedding_dim=4, hidden=6)
    heads = heads_of(values[PART], components_by_part(model, part_of)[PART])
    return {"shared": values["shared"], PART: on_wire(initialise(settings, heads, values[PART], torch.float32, number))}


def carried_out(learner: Learner, number: int, work: str = "train", counted: dict[int, float] | None = None) -> None:
    blobs = served(number)
    refs = tuple(BlobRef(part, f"{part}{number}", 1) for part in blobs)
    returns = tuple(blobs) if work == "train" else ()
    order = Order(f"{work}-{number}-kiel", number, work, refs, returns, counted=counted or {})  # type: ignore[arg-type]
    Work(learner, order, {f"{part}{number}": tensors for part, tensors in blobs.items()}).run()


def kept(home: Path) -> dict[str, bytes]:
    """Return the bytes of the newest order's files, without those that name seconds."""
    newest = max(home.glob("*/"), key=lambda folder: folder.stat().st_mtime_ns)
    return {path.name: path.read_bytes() for path in newest.glob("*.safetensors")}


def whole_course(learner: Callable[[], Learner]) -> None:
    carried_out(learner(), 1)
    carried_out(learner(), 2, counted={1: 48.0})
    carried_out(learner(), 3, counted={1: 48.0})  # that of round 2 did not count
    carried_out(learner(), 3, "evaluate", counted={3: 24.0})


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [2, 3])
def test_a_death_at_each_step_gives_the_same_bits(made: Callable[[str], Learner], tmp_path, step: str, number: int) -> None:
    undisturbed = made("whole")
    whole_course(lambda: undisturbed)
    faults.arm(f"kiel:{number}:{step}=raise-EIO")
    carried_out(made("broken"), 1)
    for order, work, counted in ((2, "train", {1: 48.0}), (3, "train", {1: 48.0}), (3, "evaluate", {3: 24.0})):
        try:
            carried_out(made("broken"), order, work, counted)  # each time a new process
        except OSError:
            assert (order, work) == (number, "train")
            carried_out(made("broken"), order, work, counted)
    assert kept(tmp_path / "broken") == kept(tmp_path / "whole")


def test_the_step_waits_on_the_disk_until_the_next_order_tells(made: Callable[[str], Learner], tmp_path: Path) -> None:
    carried_out(made("home"), 1)
    waits = read_tensors(tmp_path / "home" / "train-1-kiel" / "embedding.safetensors")
    assert waits["numbers"].tolist() == [0, 1, 12]
    assert waits["waiting"].abs().sum() > 0
    carried_out(made("home"), 1, "evaluate", {1: 48.0})
    moved = read_tensors(tmp_path / "home" / "evaluate-1-kiel" / "embedding.safetensors")
    assert moved["numbers"].tolist() == [1, 0, 0]
    # The first step of Adam moves each number by its rate, or less where the gradient is tiny.
    torch.testing.assert_close((moved["value"] - waits["value"]).abs(), torch.full((4,), 0.1), atol=0.02, rtol=0)


def test_what_is_handed_in_is_the_gradient_and_never_the_embedding(made: Callable[[str], Learner], tmp_path: Path) -> None:
    learner = made("home")
    carried_out(learner, 1)
    assert learner.state.embedding is not None
    gradient = read_tensors(tmp_path / "home" / "train-1-kiel" / "generated.safetensors")
    assert gradient.keys() == served(1)[PART].keys()
    assert learner.missing(Order("train-2-kiel", 2, "train", (BlobRef(PART, "x", 1),)))[0][1].keys() == gradient.keys()
    assert not any(tensor.numel() == 4 for tensor in gradient.values())
    assert all(tensor.isfinite().all() for tensor in gradient.values())


def test_the_owners_limit_is_for_the_network_too() -> None:
    options = {**OPTIONS, "hidden": 1_000_000, "device_bytes": 1 << 50}
    plan = msgspec.structs.replace(PLAN, method_options=options)
    with pytest.raises(LimitExceeded, match=r"the server's hypernetwork has [\d,]+ bytes; this device allows 1,000,000 "):
        embedding_of(configured_in(plan), build(SPEC, 3), plan, "kiel", 12, EmbeddingSource(None, 1_000_000))


def test_two_devices_draw_two_embeddings_and_a_damaged_secret_is_named(tmp_path: Path) -> None:
    stores = [FolderOrders(tmp_path / name) for name in ("a", "b")]
    secrets = [store.secret() for store in stores]
    assert secrets == [store.secret() for store in stores]
    assert len(set(secrets)) == 2
    assert (tmp_path / "a" / "secret").stat().st_mode & 0o077 == 0
    (tmp_path / "a" / "secret").write_bytes(b"short")
    with pytest.raises(HomeMismatch, match="secret has 5 bytes instead of 32"):
        stores[0].secret()
