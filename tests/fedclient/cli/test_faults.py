"""Behaviour of a device when the link, the server or the device itself fails in the middle."""

import threading

import pytest

from attune.common import faults
from attune.common.errors import DiskFull, HomeMismatch, NoModel, Replaced, Unreachable
from attune.common.metrics import read_metrics
from attune.common.wire.files import read_tensors
from attune.fedclient.device import FULL
from attune.fedclient.work.trainer import Trainer


@pytest.fixture
def trainings(monkeypatch):
    """Return a list that grows each time an order is trained."""
    count = []
    real = Trainer.training

    def counted(self, *args, **kwargs):
        count.append(1)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training", counted)
    return count


@pytest.fixture
def undisturbed(make_bench):
    """Return the tensors of a run without faults."""
    bench = make_bench()
    return read_tensors(bench.run(home=bench.folder / "undisturbed") / "model.safetensors")


def same(folder, tensors):
    kept = read_tensors(folder / "model.safetensors")
    return kept.keys() == tensors.keys() and all(kept[name].equal(tensors[name]) for name in tensors)


def test_two_runs_give_the_same_bits(bench, undisturbed):
    assert same(bench.run(), undisturbed)


def test_a_stream_cut_in_mid_training_is_opened_again_and_nothing_is_trained_twice(bench, trainings, undisturbed, monkeypatch):
    trainings.clear()
    bench.server.faults.break_stream_after_order = 0
    release = threading.Event()
    real = Trainer.training

    def slow(self, *args, **kwargs):
        # The work lasts until the server has sent the order again on a second stream.
        assert release.wait(20)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training", slow)

    def watch():
        while bench.server.seen.orders_sent.count("train-1-kiel") < 2:
            threading.Event().wait(0.01)
        release.set()

    threading.Thread(target=watch, daemon=True).start()
    folder = bench.run()
    assert len(trainings) == 2
    assert [update.order_id for update in bench.server.seen.submits].count("train-1-kiel") == 1
    assert any("trying again" in line for line in bench.lines.lines)
    assert "connected again" in bench.lines.lines
    assert same(folder, undisturbed)


def test_an_upload_cut_at_60_percent_goes_on_from_there(bench, undisturbed):
    bench.server.faults.break_upload_at = 0.6
    folder = bench.run()
    (_, first), (_, second), *_ = bench.server.seen.uploads
    size = bench.server.seen.submits[0].parts[0].size
    assert first == 0
    assert second == int(0.6 * size)
    assert same(folder, undisturbed)


@pytest.mark.parametrize(("fault", "value", "offset"), [("break_download_at", 100, 100), ("damage_downloads", 1, 0)])
def test_a_download_that_is_cut_goes_on_from_there_and_a_damaged_one_starts_again(bench, undisturbed, fault, value, offset):
    setattr(bench.server.faults, fault, value)
    folder = bench.run()
    digest = bench.server.seen.downloads[0][0]
    assert bench.server.seen.downloads[:2] == [(digest, 0), (digest, offset)]
    assert same(folder, undisturbed)


def test_a_blob_that_is_held_already_is_not_fetched_again(bench):
    bench.server.works, bench.server.rounds = ["evaluate", "evaluate"], [0, 1]
    bench.run()
    assert len(bench.server.seen.downloads) == 1
    first, second = (read_metrics(update.metrics_json, "the device") for update in bench.server.seen.submits[:2])
    assert first.bytes_down > 0
    assert second.bytes_down == 0


def test_a_device_stopped_between_commit_and_hand_in_hands_in_without_training(bench, trainings, undisturbed):
    trainings.clear()
    bench.server.faults.no_uploads = True
    bench.run_until(lambda: bool(bench.server.seen.uploads))
    assert len(trainings) == 1
    assert not bench.server.seen.submits
    bench.server.faults.no_uploads = False
    folder = bench.run(token=None)
    assert len(trainings) == 2, "once before, and once for the second order"
    assert same(folder, undisturbed)


def test_a_lost_receipt_is_asked_for_again(bench, undisturbed):
    bench.server.faults.lose_receipts = 1
    folder = bench.run()
    assert [update.order_id for update in bench.server.seen.submits].count("train-1-kiel") == 2
    assert same(folder, undisturbed)


def test_a_refused_update_is_said_and_the_device_goes_on(bench):
    bench.server.faults.refuse_updates = 1
    bench.run()
    assert [update.order_id for update in bench.server.seen.submits] == ["train-2-kiel", "evaluate-2-kiel"]
    assert any("REFUSED" in line and "the norm is too large" in line for line in bench.lines.lines)


def test_a_full_disk_of_a_device_is_told_to_the_operator(bench):
    """Before, the operator saw only that the device had gone."""
    faults.arm("kiel:1:state-written=raise-ENOSPC")
    try:
        error = _raised(bench)
    finally:
        faults.arm("")
    assert isinstance(error, DiskFull)
    [trouble] = bench.server.seen.troubles
    assert (trouble.order_id, trouble.reason) == ("", FULL)
    assert str(bench.folder) not in trouble.reason


def test_training_that_diverges_is_trouble_for_the_round_and_not_the_end(bench):
    import msgspec

    bench.server.train = msgspec.structs.replace(bench.server.train, lr=3e38)
    bench.run()
    assert [trouble.order_id for trouble in bench.server.seen.troubles] == ["train-1-kiel", "train-2-kiel"]
    assert "lr 3e+38" in bench.server.seen.troubles[0].reason
    assert [update.order_id for update in bench.server.seen.submits] == ["evaluate-2-kiel"]


def test_training_stops_at_the_deadline_and_the_next_order_is_carried_out(bench, monkeypatch):
    from attune.fedclient.work.objectives.descent import Cancelled

    bench.server.deadline_s = 0.5
    real, calls = Trainer.training, []

    def endless(self, theta, received, x, y, seeds, progress, cancelled, *rest):
        calls.append(1)
        if len(calls) > 1:
            return real(self, theta, received, x, y, seeds, progress, cancelled, *rest)
        for _ in range(1000):
            if cancelled():
                bench.server.deadline_s = 60.0
                raise Cancelled("stopped")
            threading.Event().wait(0.01)
        raise AssertionError("trained on for 10 s")

    monkeypatch.setattr(Trainer, "training", endless)
    bench.run()
    assert [(trouble.order_id, trouble.reason) for trouble in bench.server.seen.troubles] == [
        ("train-1-kiel", "the deadline passed")
    ]
    assert [update.order_id for update in bench.server.seen.submits] == ["train-2-kiel", "evaluate-2-kiel"]


def test_an_order_for_what_is_private_is_refused(make_bench):
    bench = make_bench(method="local", model="mlr")
    bench.server.serving["private"] = {}
    real = bench.server._offer
    bench.server._offer = lambda part, tensors: real(part, {"x": __import__("torch").zeros(1)})
    bench.server.works, bench.server.rounds = ["train"], [1]
    error = _raised(bench)
    assert isinstance(error, NoModel)
    assert "private" in bench.server.seen.troubles[0].reason
    assert not bench.server.seen.uploads


def _raised(bench, **changed):
    with pytest.raises(Exception) as caught:
        bench.run(**changed)
    return caught.value


def test_a_finish_before_any_order_is_an_error(bench):
    bench.server.works = []
    assert isinstance(_raised(bench), NoModel)


def test_a_finished_device_started_again_writes_its_model_again(bench):
    folder = bench.run()
    before = (folder / "model.safetensors").read_bytes()
    assert bench.run(token=None) == folder
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_server_that_stays_away_is_given_up(bench):
    bench.run()
    bench.server.stop()
    bench.server.stop = lambda: None
    error = _raised(bench, token=None, connect_timeout_s=0.5)
    assert isinstance(error, Unreachable)
    assert "gave up 0.5 s" in str(error)


def test_a_home_of_another_federation_is_refused(bench, tmp_path):
    import msgspec

    bench.run()
    plan = tmp_path / "home" / "plan.json"
    said = msgspec.json.decode(plan.read_bytes())
    plan.write_bytes(msgspec.json.encode(said | {"federation": "another"}))
    error = _raised(bench, token=None)
    assert isinstance(error, HomeMismatch)
    assert "another federation" in str(error)
    assert "Keep this home" in str(error) and "fedserver verify" in str(error)
    assert "another --home" not in str(error)


def test_a_device_that_was_replaced_says_so_and_ends(bench):
    bench.server.faults.replaced = True
    error = _raised(bench)
    assert isinstance(error, Replaced)
    assert error.exit_code == 24
    assert "another process uses the identity of this device (kiel opened a newer stream)" in str(error)
    assert len(bench.server.seen.hellos) == 1
