"""One flipped bit in a file of the server: it is detected before it is used, and repaired to the same bits or named."""

from pathlib import Path

import pytest

from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.ports.blobs import Damaged
from tests.fedserver.bench import Bench, plan

METHODS = ["fedavg", "fedtp", "fedmcsa", "fedtp+mcsa", "fedamp"]


def flip(path: Path) -> bytes:
    """Flip one bit near the end, among the tensors, and return the content before."""
    before = path.read_bytes()
    data = bytearray(before)
    data[-3] ^= 0x20
    path.write_bytes(data)
    return before


def slots_of(bench: Bench, version: int) -> list[Path]:
    return sorted((bench.folder / "state").glob(f"*.{version}.safetensors"))


@pytest.mark.parametrize("method", METHODS)
def test_every_file_of_the_last_round_is_made_again_with_the_same_bits(tmp_path: Path, method: str) -> None:
    bench = Bench(tmp_path, plan(method, "vit"))
    bench.digests(("a", "b", "visitor"))  # a client that is served and takes no part is in the hypernetwork's file as well
    bench.close(a=(0.25, 3), b=(-0.5, 5))
    bench.digests(("a", "b", "late"))
    bench.close(a=(1.0, 3), c=(-0.25, 5))
    served = bench.digests(("a", "b", "c"))
    written = slots_of(bench, 2)
    assert written
    for path in written:
        whole = flip(path)
        bench.restart()
        assert bench.remade == [f"state/{path.name}"]
        assert path.read_bytes() == whole
        path.unlink()
        bench.restart()
        assert path.read_bytes() == whole
    assert bench.digests(("a", "b", "c")) == served
    assert bench.blobs.names("redo/") == []
    bench.close(a=(0.0, 1), b=(1.0, 1))  # the next round continues from them


@pytest.mark.parametrize("method", METHODS)
def test_the_first_state_is_made_again_from_the_seed(tmp_path: Path, method: str) -> None:
    bench = Bench(tmp_path, plan(method, "vit"))
    served = bench.digests()
    for path in slots_of(bench, 0):
        whole = flip(path)
        bench.restart()
        assert (bench.remade, path.read_bytes()) == ([f"state/{path.name}"], whole)
    assert bench.digests() == served


def test_what_is_as_old_as_the_federation_is_made_again_before_what_needs_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan("fedtp", "vit"))
    bench.close(a=(0.25, 3), b=(-0.5, 5))
    names = ["state/generated.initial.0.safetensors", "state/generated.network.1.safetensors"]
    whole = [flip(tmp_path / name) for name in names]
    bench.restart()
    assert bench.remade == names
    assert [(tmp_path / name).read_bytes() for name in names] == whole


@pytest.mark.parametrize("common", [True, False])
def test_an_adaptation_is_made_again_as_well(tmp_path: Path, common: bool) -> None:
    bench = Bench(tmp_path, plan("fedtp", "vit"))
    bench.close(a=(0.25, 3), b=(-0.5, 5))
    bench.digests(("z",))
    adaptation = AdaptationSpec(("generated",), ("generated",), common)
    bench.take({"z": bench.entry("z", 0.125, 4)}, adaptation=adaptation)
    [path] = slots_of(bench, 2)
    whole = flip(path)
    bench.restart()
    assert (bench.remade, path.read_bytes()) == ([f"state/{path.name}"], whole)


def test_a_file_that_cannot_be_made_again_is_named_with_what_to_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan("fedmcsa", "vit"))
    bench.digests(("a", "b"))
    bench.close(a=(0.25, 3), b=(-0.5, 5))
    bench.close(a=(0.5, 3))
    bench.close(a=(0.75, 3))
    [old] = [path for path in slots_of(bench, 1) if "client~b" in path.name]
    whole = flip(old)
    bench.restart()  # it was not read yet
    with pytest.raises(Damaged, match=rf"{old} is damaged.*restore it from a backup") as caught:
        bench.engine.serve(["b"])
    assert caught.value.exit_code == 4
    old.write_bytes(whole)
    assert bench.engine.serve(["b"])

    [update] = tmp_path.glob("inbox/a.attended.2")
    flip(slots_of(bench, 3)[0])
    flip(update)
    with pytest.raises(Damaged, match=rf"{slots_of(bench, 3)[0]} is damaged.*cannot be made again.*{update}"):
        bench.restart()


def test_bits_that_came_out_otherwise_are_not_passed_off_as_the_state(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan("fedavg", "mlr"))
    bench.close(a=(0.25, 3), b=(-0.5, 5))
    recipe = tmp_path / "state" / "recipe.1.json"
    text = recipe.read_text()
    assert '"samples":3' in text
    recipe.write_text(text.replace('"samples":3', '"samples":4'))
    [path] = slots_of(bench, 1)
    flip(path)
    with pytest.raises(Damaged, match="other bits"):
        bench.restart()
    recipe.write_text("{")
    with pytest.raises(Damaged, match=f"{path} is damaged"):
        bench.restart()
        bench.engine.serve(["a"])


def test_what_a_kill_left_beside_the_state_goes_at_the_next_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path, plan("fedmcsa", "vit"))
    bench.close(a=(0.25, 3), b=(-0.5, 5))
    kept = set(bench.blobs.names("state/"))
    bench.round(a=(1.0, 1))  # staged, and never committed
    for name in ("shared.value.9.safetensors", "recipe.9.json", ".shared.value.9.safetensors.0123456789ab.tmp"):
        (tmp_path / "state" / name).touch()
    (tmp_path / "serve").mkdir(exist_ok=True)
    (tmp_path / "serve" / "generated.a.safetensors").touch()
    bench.restart()
    bench.blobs.sweep()
    assert {f"state/{path.name}" for path in (tmp_path / "state").iterdir()} == kept
    assert list((tmp_path / "serve").iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_round_that_was_staged_and_not_committed_is_closed_again_to_the_same_bits(tmp_path: Path, method: str) -> None:
    """Fill the disk between aggregation and commit: the server repeats the whole step in the same process."""
    benches = [Bench(tmp_path / name, plan(method, "vit")) for name in ("once", "again")]
    for bench in benches:
        bench.close(a=(0.25, 3), b=(-0.5, 5))
    once, again = benches
    again.round(a=(1.0, 3), c=(-0.25, 5))
    for bench in benches:
        bench.close(a=(1.0, 3), c=(-0.25, 5))
    assert again.digests(("a", "b", "c")) == once.digests(("a", "b", "c"))
    assert {slot.digest for slot in again.slots.values()} == {slot.digest for slot in once.slots.values()}
