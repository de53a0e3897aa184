"""Tensors of a round: served values, refused updates, and a restart at any moment that serves the same bits."""

import pytest
import torch

from attune.common.errors import UpdateRefused
from attune.common.methods.registry import configured_in
from attune.common.wire import tensors as of_tensors
from attune.fedserver.core.adaptation import adaptation_of
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.lab.vault import name_of
from tests.fedserver.bench import Bench, plan
from tests.raising import malformed


@pytest.fixture
def bench(tmp_path):
    return lambda *what, **options: Bench(tmp_path, plan(*what, **options))


def test_fedavg_serves_one_file_and_its_mean_is_weighted_by_samples(bench):
    tiny = bench()
    served = tiny.engine.serve(["a", "b"])
    assert list(tiny.engine.max_bytes()) == ["shared"]
    assert served["a"]["shared"].digest == served["b"]["shared"].digest
    tiny.close(a=(1.0, 30), b=(5.0, 10), c=(100.0, 0))
    for tensor in tiny.read(tiny.engine.serve(["a"])["a"]["shared"]).values():
        assert torch.equal(tensor, torch.full_like(tensor, 2.0))


@pytest.mark.parametrize("method", ["fedavg", "fedtp", "fedmcsa", "fedtp+mcsa"])
def test_a_restart_before_or_after_the_commit_serves_the_same_bits(bench, method):
    tiny = bench(method, "vit")
    before = tiny.digests()
    tiny.restart()
    assert tiny.digests() == before
    tiny.round(a=(0.25, 3), b=(-0.5, 5))  # staged, and lost with the process
    tiny.restart()
    assert tiny.digests() == before
    tiny.close(a=(0.25, 3), b=(-0.5, 5))
    after = tiny.digests()
    assert after != before
    tiny.restart()
    assert tiny.digests() == after
    before = set(tiny.slots.values())
    tiny.close(a=(0.0, 1), b=(1.0, 1))
    kept = {f"state/{slot.file}" for slot in before | set(tiny.slots.values())}
    assert set(tiny.blobs.names("state/")) >= kept, "what the last round replaced is kept"
    before = set(tiny.slots.values())
    tiny.close(a=(0.5, 1), b=(1.0, 1))
    kept = {f"state/{slot.file}" for slot in before | set(tiny.slots.values())}
    assert set(tiny.blobs.names("state/")) == kept | {name_of(3)}, "until the next one is closed"


@pytest.mark.parametrize(("method", "own"), [("fedavg", "shared"), ("fedtp", "generated"), ("fedmcsa", "attended")])
def test_what_a_stranger_is_served_is_made_once_and_survives_a_restart(bench, method, own):
    tiny = bench(method, "vit")
    tiny.digests()
    tiny.close(a=(0.25, 3), b=(-0.5, 5))
    common = tiny.engine.cold_start(["a"])["a"]
    assert common.keys() == tiny.engine.manifests.keys()
    assert all(tiny.engine.cold_start(["a"])["a"][part] is blob for part, blob in common.items())
    served = {parts[own] for parts in tiny.digests().values()}
    assert (common[own].digest in served) == (own == "shared")
    for part, manifest in tiny.engine.manifests.items():
        assert tiny.read(common[part]).keys() == manifest.keys()
    tiny.restart()
    assert {part: blob.digest for part, blob in tiny.engine.cold_start(["a"])["a"].items()} == {
        p: b.digest for p, b in common.items()
    }
    tiny.close(a=(1.0, 1), b=(1.0, 1))
    assert tiny.blobs.names("serve/") == [], "what was made of the old state is gone, and only that"
    assert tiny.engine.cold_start(["a"])["a"][own].digest != common[own].digest


@pytest.fixture(params=[None, 7], ids=["whole", "blocks"])
def checked_in(request, monkeypatch):
    """Check updates a few numbers at a time, so that tensors of these sizes have several blocks."""
    if request.param:
        monkeypatch.setattr(of_tensors, "BLOCK", request.param)


def test_updates_that_do_not_fit_are_refused_by_name(bench, tmp_path, checked_in):
    tiny = bench()
    good = {name: torch.zeros(spec.shape) for name, spec in tiny.engine.manifests["shared"].items()}
    name = max(good, key=lambda key: good[key].numel())
    wrong = {
        "wrong-shape": good | {name: torch.zeros(1)},
        "wrong-dtype": good | {name: good[name].double()},
        "not-finite": good | {name: good[name] + float("nan")},
        "missing-tensor": {key: tensor for key, tensor in good.items() if key != name},
    }
    for kind, tensors in wrong.items():
        update = tiny.write("uploads/update", tensors)
        with malformed(kind, match=f"kiel's shared update.*{name}"):
            tiny.engine.arrive("kiel", "shared", update, max_norm=0.0)


def test_one_number_in_the_last_block_is_found_and_counted_once(bench, checked_in):
    tiny = bench()
    update = {name: torch.zeros(spec.shape) for name, spec in tiny.engine.manifests["shared"].items()}
    name = max(update, key=lambda key: update[key].numel())
    update[name].view(-1)[-1] = float("inf")
    with malformed("not-finite", match=f"{name}.*0 NaN and 1 infinite of {update[name].numel()} values"):
        tiny.engine.arrive("kiel", "shared", tiny.write("uploads/update", update), max_norm=0.0)


def test_the_norm_that_is_limited_is_of_the_change(bench, tmp_path, checked_in):
    tiny = bench()
    served = tiny.read(tiny.engine.serve(["a"])["a"]["shared"])
    count = sum(tensor.numel() for tensor in served.values())
    update = tiny.write("uploads/update", {name: tensor + 2.0 for name, tensor in served.items()})
    norm = 2.0 * count**0.5
    tiny.engine.arrive("a", "shared", update, max_norm=norm * 1.001)
    with pytest.raises(UpdateRefused, match="norm"):
        tiny.engine.arrive("a", "shared", update, max_norm=norm * 0.999)


def test_no_answer_may_be_much_larger_than_the_part(bench):
    tiny = bench()
    size = tiny.engine.serve(["a"])["a"]["shared"].size
    assert size <= tiny.engine.max_bytes()["shared"] <= size + (1 << 17)


@pytest.mark.parametrize("adapt", ["personal", "hypernetwork", "all"])
def test_an_adaptation_takes_up_what_it_says_and_nothing_else(bench, adapt):
    tiny = bench("fedtp+mcsa", "vit")
    tiny.close(a=(0.25, 3), b=(-0.5, 5))
    before = tiny.digests(("a", "b", "z"))
    adaptation = adaptation_of(configured_in(tiny.plan), adapt)
    tiny.take({"z": tiny.entry("z", 0.125, 4)}, adaptation=adaptation)
    after = tiny.digests(("a", "b", "z"))
    tiny.restart()
    assert tiny.digests(("a", "b", "z")) == after
    changed = {(name, part) for name in after for part in after[name] if after[name][part] != before[name][part]}
    own = {("z", "generated"), ("z", "attended")}
    everybodys = {("a", "generated"), ("b", "generated"), ("z", "generated")}
    assert changed == {"personal": own, "hypernetwork": everybodys, "all": own | everybodys}[adapt]


def test_an_adaptation_on_the_device_alone_leaves_the_state_as_it_is(bench):
    tiny = bench("fedper", "vit")
    before = tiny.digests()
    adaptation = adaptation_of(configured_in(tiny.plan), "personal")
    entry = AcceptedUpdate(Report(round=1, work="train", client="z", samples=4), {})
    assert tiny.engine.aggregate({"z": entry}, adaptation=adaptation).metrics == {}
    assert tiny.engine.staged_slots() == []
    assert tiny.digests() == before
