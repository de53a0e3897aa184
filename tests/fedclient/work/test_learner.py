"""Effect of an order on a device's tensors, and the tensors that are handed in: never private ones."""

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from attune.common.config import TrainSettings
from attune.common.errors import DiskFull, Forbidden, HomeMismatch, WireError
from attune.common.exchange.encodings import encode
from attune.common.exchange.messages import BlobRef, Order
from attune.common.models.registry import default_spec
from attune.common.plan import Plan
from attune.common.wire.files import read_tensors
from attune.common.wire.int8 import SCALES
from attune.fedclient.data.prepare import prepare
from attune.fedclient.data.shard import load_shard
from attune.fedclient.work.executor import Work
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.objectives.descent import Cancelled
from attune.fedclient.work.state import FolderOrders, check_order_id

CPU = torch.device("cpu")


@pytest.fixture
def images(tmp_path):
    return images_in(tmp_path / "images")


def images_in(folder):
    """Write a shard of images of two classes, and read it."""
    rng = np.random.default_rng(1)
    folder.mkdir()
    for part, size in (("train", 12), ("test", 6)):
        y = rng.integers(0, 2, size)
        x = rng.integers(0, 80, (size, 8, 8)).astype(np.uint8) + (y * 120).astype(np.uint8)[:, None, None]
        np.savez(folder / f"{part}.npz", x=x, y=y)
    return load_shard(folder)


@pytest.fixture
def make(images, tmp_path):
    def learner(method="fedtp", name="kiel", home="home", **options):
        spec = default_spec("images", (8, 8, 1), 2, 0, "vit", {})
        plan = Plan("f", 3, spec, [0, 1], method, options, TrainSettings(lr=0.05, batch_size=4, local_epochs=1))
        return Learner(plan, prepare(images, plan), name, FolderOrders(tmp_path / home), CPU)

    return learner


def served(learner, part, scale=1.0):
    names = [name for name, kind in learner.part_of.items() if kind == part]
    tensors = {name: learner.state.theta[name] * scale for name in names}
    return BlobRef(part, f"{part}{scale}", 1), tensors


def carry_out(learner, order, fetched=None, cancelled=lambda: False):
    return Work(learner, order, fetched or {}, cancelled=cancelled).run()


def handed_in(learner, result, part):
    return read_tensors(learner.orders.blob(result.order_id, part))


def test_fedtp_hands_in_values_of_shared_parts_and_changes_of_generated_ones(make):
    learner = make()
    (shared, shared_tensors), (generated, generated_tensors) = (
        served(learner, "shared", 0.5),
        served(learner, "generated", 0.25),
    )
    order = Order("train-1-kiel", 1, "train", (shared, generated), ("shared", "generated"))
    assert learner.missing(order) == [(ref, learner.holdings.expected(ref.part)) for ref in (shared, generated)]
    result = carry_out(learner, order, {shared.digest: shared_tensors, generated.digest: generated_tensors})
    values, change = handed_in(learner, result, "shared"), handed_in(learner, result, "generated")
    assert values.keys() | change.keys() == learner.state.theta.keys()
    assert not values.keys() & change.keys()
    assert all("q" in name or "k" in name or "v" in name for name in change)
    for name, value in values.items():
        assert value.equal(learner.state.theta[name])
    for name, value in change.items():
        assert value.equal(learner.state.theta[name] - generated_tensors[name])
        assert value.abs().sum() > 0
    state = learner.orders.state(result)
    assert all(state[name].equal(learner.state.theta[name]) for name in learner.state.theta)


def test_private_tensors_stay_and_go_on_from_the_devices_own_state(make):
    learner = make("vanilla-personalized")
    private = [name for name, kind in learner.part_of.items() if kind == "private"]
    assert private
    ref, tensors = served(learner, "shared")
    first = carry_out(learner, Order("train-1-kiel", 1, "train", (ref,), ("shared",)), {ref.digest: tensors})
    assert not set(handed_in(learner, first, "shared")) & set(private)
    mine = {name: learner.state.theta[name].clone() for name in private}
    again = make("vanilla-personalized")
    assert all(again.state.theta[name].equal(mine[name]) for name in private), "a restart goes on from the commit"
    back, tensors = served(again, "shared", 0.0)
    carry_out(again, Order("evaluate-1-kiel", 1, "evaluate", (back,)), {back.digest: tensors})
    assert all(again.state.theta[name].equal(mine[name]) for name in private)
    assert all(not again.state.theta[name].any() for name in tensors)
    for asked in ("private", "generated", "nonsense"):
        with pytest.raises(Forbidden):
            again.holdings.expected(asked)
        with pytest.raises(Forbidden):
            carry_out(again, Order("train-2-kiel", 2, "train", (), (asked,)))


def test_an_order_says_which_tensors_move_and_hands_in_the_change_of_those(make):
    """Use a newcomer's order under FedTP: shared tensors are bit for bit as received."""
    learner = make()
    (shared, shared_tensors), (generated, generated_tensors) = served(learner, "shared", 0.5), served(learner, "generated")
    order = Order("train-41-kiel", 41, "train", (shared, generated), ("generated",), trains=("generated",))
    result = carry_out(learner, order, {shared.digest: shared_tensors, generated.digest: generated_tensors})
    assert all(learner.state.theta[name].equal(tensor) for name, tensor in shared_tensors.items())
    change = handed_in(learner, result, "generated")
    assert change.keys() == generated_tensors.keys() and all(tensor.any() for tensor in change.values())
    before = dict(learner.state.theta)
    for kind in ("private", "personal", "nonsense"):
        with pytest.raises(Forbidden, match=kind):
            carry_out(learner, Order("train-42-kiel", 42, "train", trains=("generated", kind)))
    assert all(learner.state.theta[name].equal(before[name]) for name in before)
    carry_out(make("fedrod", home="two-heads"), Order("train-1-kiel", 1, "train", trains=("personal",)))


def test_a_restart_between_two_orders_changes_nothing(make):
    def rounds(home, restart):
        learner = make("fedmcsa", home=home, mu=0.5)
        for number in (1, 2):
            refs, fetched = (), {}
            if number == 1:
                ref, tensors = served(learner, "attended", 0.9)
                refs, fetched = (ref,), {ref.digest: tensors}
            # The second order serves no tensors: proximal centre and weights are those that the device has kept.
            carry_out(learner, Order(f"train-{number}-kiel", number, "train", refs, ("attended",)), fetched)
            if restart:
                learner = make("fedmcsa", home=home, mu=0.5)
        return learner

    one, two = rounds("a", False), rounds("b", True)
    assert all(one.state.theta[name].equal(two.state.theta[name]) for name in one.state.theta)
    assert all(one.state.received[name].equal(two.state.received[name]) for name in one.state.received)
    assert one.holdings.served == two.holdings.served == {"attended": "attended0.9"}


def test_other_names_and_rounds_draw_other_batches(make):
    ends = []
    for home, name, round_ in (("a", "kiel", 1), ("b", "kiel", 1), ("c", "bonn", 1), ("d", "kiel", 2)):
        learner = make("fedavg", name=name, home=home)
        result = carry_out(learner, Order("train-x", round_, "train", (), ("shared",)))
        ends.append(result.parts[0].digest)
    assert ends[0] == ends[1]
    assert len(set(ends)) == 3


def test_an_order_that_is_committed_is_not_done_again(make):
    learner = make("fedavg")
    order = Order("train-1-kiel", 1, "train", (), ("shared",))
    assert carry_out(learner, order) is carry_out(learner, order)
    assert learner.newest.sequence == 1


def test_cancelled_work_changes_nothing(make):
    learner = make("fedavg")
    before = dict(learner.state.theta)
    with pytest.raises(Cancelled):
        carry_out(learner, Order("train-1-kiel", 1, "train", (), ("shared",)), cancelled=lambda: True)
    assert all(learner.state.theta[name] is before[name] for name in before)
    assert learner.orders.newest() is None


def test_only_the_newest_order_and_the_one_before_are_kept_and_crumbs_are_swept_up(make, tmp_path):
    learner = make("fedavg")
    for number in (1, 2):
        carry_out(learner, Order(f"train-{number}-kiel", number, "train", (), ("shared",)))
    orders = tmp_path / "home"
    assert sorted(path.name for path in orders.iterdir()) == ["train-1-kiel", "train-2-kiel"]
    (orders / ".filling-train-3-kiel").mkdir()
    (orders / ".filling-train-3-kiel" / "state.safetensors").write_bytes(b"half")
    assert make("fedavg").newest.order_id == "train-2-kiel"
    assert sorted(path.name for path in orders.iterdir()) == ["train-1-kiel", "train-2-kiel"]


def test_damaged_state_is_named_and_not_thrown_away(make, tmp_path):
    learner = make("fedavg")
    carry_out(learner, Order("train-1-kiel", 1, "train", (), ("shared",)))
    update = tmp_path / "home" / "train-1-kiel" / "update.json"
    update.write_bytes(b"{")
    with pytest.raises(HomeMismatch, match=r"update\.json is damaged"):
        make("fedavg")
    assert update.exists()


def test_state_of_another_model_is_refused(make, tmp_path):
    learner = make("fedavg")
    result = carry_out(learner, Order("train-1-kiel", 1, "train", (), ("shared",)))
    learner.orders.commit(msgspec.structs.replace(result, order_id="x", sequence=2), {"w": torch.zeros(3)}, {}, {})
    with pytest.raises(HomeMismatch, match="not of this federation's model"):
        make("fedavg")


def test_a_full_disk_is_said_and_leaves_the_old_state(make, tmp_path, monkeypatch):
    import errno
    from pathlib import Path

    learner = make("fedavg")
    carry_out(learner, Order("train-1-kiel", 1, "train", (), ("shared",)))
    real = Path.rename

    def full(self, target):
        if self.name == ".filling-train-2-kiel":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(DiskFull):
        carry_out(learner, Order("train-2-kiel", 2, "train", (), ("shared",)))
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["train-1-kiel"]
    assert learner.newest.order_id == make("fedavg").newest.order_id == "train-1-kiel"


@pytest.mark.parametrize("order_id", ["", "..", "../x", "a/b", ".hidden", "x" * 200, "a\n", ".filling-train-1"])
def test_an_order_id_that_is_no_folder_name_is_refused(order_id):
    with pytest.raises(WireError):
        check_order_id(order_id)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_trains_to_nearly_the_same_weights(images, make, tmp_path):
    spec = default_spec("images", (8, 8, 1), 2, 0, "vit", {"dropout": 0.0})
    plan = Plan("f", 3, spec, [0, 1], "fedavg", {}, TrainSettings(lr=0.05, batch_size=4, local_epochs=2))
    order = Order("train-1-kiel", 1, "train", (), ("shared",))
    ends = []
    for kind in ("cpu", "cuda", "cuda"):
        learner = Learner(
            plan, prepare(images, plan), "kiel", FolderOrders(tmp_path / f"{kind}{len(ends)}"), torch.device(kind)
        )
        assert learner.data.train_x.device.type == kind
        carry_out(learner, order)
        ends.append(learner.state.theta)
    for name, value in ends[0].items():
        assert torch.allclose(value, ends[1][name], atol=1e-4), name
        assert ends[1][name].device.type == "cpu"


@pytest.mark.parametrize(
    ("method", "files"), [("fedavg", {"shared"}), ("fedper", {"shared", "state"}), ("fedtp", {"shared", "generated", "state"})]
)
def test_each_tensor_is_written_once_and_the_state_is_whole(make, tmp_path, method, files):
    """Use fedper, which keeps its head, and fedtp, whose changes are handed in, so that the state has them too."""
    learner = make(method)
    returns = tuple(sorted(files - {"state"}))
    result = carry_out(learner, Order("train-1-kiel", 1, "train", (), returns))
    folder = tmp_path / "home" / "train-1-kiel"
    written = {path.stem: read_tensors(path) for path in folder.glob("*.safetensors")}
    assert written.keys() - {"received"} == files
    private = {name for name, part in learner.part_of.items() if part != "shared"}
    assert written.get("state", {}).keys() == private
    state = FolderOrders(learner.orders.path).state(result)
    assert state.keys() == learner.state.theta.keys()
    assert all(torch.equal(state[name], learner.state.theta[name]) for name in state)


@pytest.mark.parametrize(("method", "part"), [("fedavg", "shared"), ("fedtp", "generated")])
def test_what_is_handed_in_with_loss_leaves_the_device_exact(make, method, part):
    exact, lossy = make(method, home="exact"), make(method, home="lossy")
    order = Order("train-1-kiel", 1, "train", (), (part,))
    expected = handed_in(exact, carry_out(exact, order), part)
    result = carry_out(lossy, replace(order, encodings={part: "bf16"}))
    sent = handed_in(lossy, result, part)
    assert result.encodings == {part: "bf16"} and result.state_parts == ()
    assert {name: tensor.dtype for name, tensor in sent.items()} == dict.fromkeys(expected, torch.bfloat16)
    for name, tensor in expected.items():
        assert torch.equal(sent[name], tensor.to(torch.bfloat16))
    state = FolderOrders(lossy.orders.path).state(result)
    assert all(torch.equal(state[name], exact.state.theta[name]) for name in exact.state.theta)


@pytest.mark.parametrize(("method", "part"), [("fedavg", "shared"), ("fedtp", "generated")])
def test_int8_hands_in_the_change_and_keeps_what_it_lacks(make, method, part):
    exact, lossy = make(method, home="exact"), make(method, home="lossy")
    first, second = (Order(f"train-{n}-kiel", n, "train", (served(exact, part)[0],), (part,)) for n in (1, 2))
    weights = served(exact, part)[1]
    fetched = {f"{part}1.0": weights}
    base = None if part == "generated" else weights
    expected = handed_in(exact, carry_out(exact, first, fetched), part)
    sent = handed_in(lossy, carry_out(lossy, replace(first, encodings={part: "int8"}), fetched), part)
    assert sent.keys() == {*expected, SCALES}
    owed = lossy.state.owed
    assert owed.keys() == expected.keys() and any(error.abs().max() > 0 for error in owed.values())
    written = encode(expected, "int8", base)
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.tensors.items())
    assert all(torch.equal(owed[name], error) for name, error in written.errors.items())

    again = make(method, home="lossy")  # as after a kill of the process
    assert all(torch.equal(again.state.owed[name], error) for name, error in owed.items())
    expected = handed_in(exact, carry_out(exact, second, fetched), part)
    sent = handed_in(again, carry_out(again, replace(second, encodings={part: "int8"}), fetched), part)
    written = encode(expected, "int8", base, owed)
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.tensors.items())
    assert any(not torch.equal(tensor, sent[name]) for name, tensor in encode(expected, "int8", base).tensors.items())


def test_what_an_update_lacks_is_made_up_for_once(make):
    """Answer a repeated order with the same bytes; an evaluation and a plain update do not change the error feedback."""
    learner = make("fedavg")
    ref, weights = served(learner, "shared")
    order = Order("train-1-kiel", 1, "train", (ref,), ("shared",), encodings={"shared": "int8"})
    result = carry_out(learner, order, {ref.digest: weights})
    owed = learner.state.owed
    again = make("fedavg")
    assert carry_out(again, order).parts == result.parts
    assert all(torch.equal(again.state.owed[name], error) for name, error in owed.items())
    carry_out(again, Order("evaluate-1-kiel", 1, "evaluate", (ref,)), {ref.digest: weights})
    carry_out(again, Order("train-2-kiel", 2, "train", (ref,), ("shared",)), {ref.digest: weights})
    last = make("fedavg")
    assert owed.keys() == last.state.owed.keys()
    assert all(torch.equal(last.state.owed[name], error) for name, error in owed.items())


def test_a_change_from_what_was_not_served_fails_the_order_alone(make):
    learner = make("fedavg")
    with pytest.raises(WireError, match="a change from what it does not serve"):
        carry_out(learner, Order("train-1-kiel", 1, "train", (), ("shared",), encodings={"shared": "int8"}))
    assert learner.orders.newest() is None


def test_an_encoding_that_this_device_does_not_know_fails_the_order_alone(make):
    learner = make("fedavg")
    with pytest.raises(WireError, match=r"int4.*update fedclient"):
        carry_out(learner, Order("train-1-kiel", 1, "train", (), ("shared",), encodings={"shared": "int4"}))
    assert learner.orders.newest() is None
