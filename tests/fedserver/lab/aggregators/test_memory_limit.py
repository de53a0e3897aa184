"""A cohort larger than the memory that a process may have: updates are read tensor by tensor, and never all at once."""

import json
import os
import resource
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings, MeanSettings
from attune.common.wire.files import TensorFile, write_tensors
from attune.fedserver.lab.aggregators.attention import Mcsa
from attune.fedserver.lab.aggregators.base import Aggregator
from attune.fedserver.lab.aggregators.mean import Mean
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.stores.folder import FolderBlobs
from tests.forked import STEADY, Forked

CLIENTS, TENSORS, NUMBERS = 12, 12, 250_000  # of float32: 1 MB a tensor, 144 MB a cohort
ROOM_BYTES = 48 << 20  # a third of the cohort
KINDS = ("attention", "mean")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much a process has")


def aggregator_in(folder: Path, kind: str) -> tuple[Aggregator, StateVault]:
    """Make an aggregator with a state of zeros."""
    vault = StateVault(FolderBlobs(folder), kind, [], 0)
    components = {f"layer{n}": [f"layer{n}"] for n in range(TENSORS)}
    made: Aggregator = (
        Mcsa(AttentionSettings(), vault, 0, components) if kind == "attention" else Mean(MeanSettings(), vault, 0, components)
    )
    made.start({name: torch.zeros(NUMBERS) for name in components})
    return made, vault


def close_round(aggregator: Aggregator, updates: Path) -> None:
    with ExitStack() as opened:
        files = [(path.stem, opened.enter_context(TensorFile(path))) for path in sorted(updates.iterdir())]
        aggregator.close_round([PartUpdate(name, 1.0, file) for name, file in files])


def within() -> None:
    """Run in the limited process: a round within ROOM_BYTES beyond its memory; then all updates at once, if there is room."""
    folder, updates, kind = Path(sys.argv[0]), Path(sys.argv[1]), sys.argv[2]
    aggregator, vault = aggregator_in(folder, kind)
    has_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (has_bytes + ROOM_BYTES, resource.RLIM_INFINITY))
    close_round(aggregator, updates)
    digests = {slot.key: slot.digest for slot in vault.staged_slots()}
    try:
        everything = [dict(TensorFile(path)) for path in updates.iterdir()]
    except (MemoryError, RuntimeError):
        everything = []
    print(json.dumps([digests, len(everything)]))


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("updates")
    draw = torch.Generator().manual_seed(0)
    for client in range(CLIENTS):
        write_tensors(
            folder / f"{client:02}.safetensors", {f"layer{n}": torch.randn(NUMBERS, generator=draw) for n in range(TENSORS)}
        )
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_a_cohort_beyond_memory_is_aggregated_with_the_same_bits(kind: str, updates: Path, tmp_path: Path) -> None:
    words = [str(tmp_path / "limited"), str(updates), kind]
    with (tmp_path / "log").open("wb") as log:
        process = Forked(words, log, log, os.environ | STEADY, f"{__name__}:within")
    assert process.wait(120) == 0, (tmp_path / "log").read_text()
    found, at_once = json.loads((tmp_path / "log").read_text())
    assert at_once == 0, "the limit would have to be lower to show anything"
    aggregator, vault = aggregator_in(tmp_path / "unlimited", kind)
    close_round(aggregator, updates)
    assert found == {slot.key: slot.digest for slot in vault.staged_slots()}
