"""Memory of blocks that were freed between blocks in use goes back to the system when it is asked for."""

import asyncio
import ctypes
import inspect
import os
import platform
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attune.common.aio import run, timeout
from attune.common.config import ServerSettings, convert
from attune.common.errors import FederationFailed, SettingError
from attune.common.hardware import return_free_memory
from attune.features.web.serving import PageAddress, names_of
from attune.fedserver import app
from attune.fedserver.federation.streams import Streams
from attune.fedserver.home import ServedAddress
from attune.fedserver.process import ENROLLING_MAPPING_BYTES, map_blocks

BLOCKS, BLOCK_BYTES = 4000, 8 << 10
NOT_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in other ways")
ROOT = Path(__file__).resolve().parents[2]
HERE = os.environ | {"PYTHONPATH": f"{ROOT / '.package'}:{ROOT}"}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return library


@NOT_GLIBC
def test_free_pages_between_blocks_in_use_go_back() -> None:
    library = c_library()
    blocks = [library.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last one keeps the end of the heap in use
        library.free(block)
    before = resident_bytes()
    return_free_memory()
    library.free(blocks[-1])
    assert before - resident_bytes() > BLOCKS * BLOCK_BYTES // 2


def taken_by_new_blocks(least_bytes: int) -> int:
    """Free blocks that were written to, take as many again of which one page each is written to, and return what those take."""
    library, block_bytes = c_library(), ENROLLING_MAPPING_BYTES + 1024
    map_blocks(least_bytes)
    before = resident_bytes()
    written = [library.malloc(block_bytes) for _ in range(BLOCKS)]
    for block in written:
        ctypes.memset(block, 1, block_bytes)
    library.malloc(block_bytes)  # keeps the end of the heap in use
    for block in written:
        library.free(block)
    for _ in range(BLOCKS):
        ctypes.memset(library.malloc(block_bytes), 1, 1)
    return resident_bytes() - before


@NOT_GLIBC
def test_a_mapped_block_takes_memory_only_where_it_is_written_to() -> None:
    """Use a process for each way, because the heap of this one has other free blocks. It imports what it needs alone."""
    taken = []
    needs = (
        "import ctypes, os\nfrom pathlib import Path\nfrom attune.fedserver.process import ENROLLING_MAPPING_BYTES, map_blocks"
    )
    source = "\n".join(map(inspect.getsource, (resident_bytes, c_library, taken_by_new_blocks)))
    for least_bytes in (1 << 20, ENROLLING_MAPPING_BYTES):
        code = f"{needs}\nBLOCKS = {BLOCKS}\n{source}\nprint(taken_by_new_blocks({least_bytes}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=HERE)
        taken.append(int(done.stdout))
    assert taken[0] > BLOCKS * ENROLLING_MAPPING_BYTES
    assert taken[1] < taken[0] / 2


# --- the end of a server with --exit-when-done: the devices for which it waits, and for how long

GRACE_S = 30.0


class Leaving(dict[str, float]):
    """Times at which devices left: a device that comes and goes has always left just now."""

    def __init__(self, now: Any) -> None:
        super().__init__(ada=0.0)
        self._now = now

    def __getitem__(self, name: str) -> float:
        return float(self._now())


def ended(left_at: dict[str, float], error: Exception | None = None) -> Any:
    """Return what `_goodbye` needs of a coordinator that has ended. Its clock moves on by a second with each look."""
    finished, ticks = asyncio.Event(), count(100)
    finished.set()
    state = SimpleNamespace(
        settings=SimpleNamespace(round=SimpleNamespace(grace_s=GRACE_S)),
        clock=SimpleNamespace(monotonic=lambda: float(next(ticks))),
        round=SimpleNamespace(left_at=left_at),
        streams=Streams(),
    )
    return SimpleNamespace(finished=finished, error=error, state=state)


@pytest.fixture(autouse=True)
def no_time_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STEP_S", 0.0)


def seconds_of(coordinator: Any, returning: bool = False) -> float:
    """Return for how long the server waits, by the coordinator's clock."""

    async def goodbye() -> float:
        began = coordinator.state.clock.monotonic()
        async with timeout(20):
            await app._goodbye(coordinator, returning)
        return float(coordinator.state.clock.monotonic() - began)

    return run(goodbye())


def test_a_device_that_left_just_before_the_end_has_its_grace_to_return() -> None:
    assert GRACE_S - 5 < seconds_of(ended({"ada": 100.0})) < GRACE_S + 5
    assert app.RETURN_S - 5 < seconds_of(ended({"ada": 100.0}), returning=True) < app.RETURN_S + 5


@pytest.mark.parametrize("case", ["nobody left", "long ago", "had its farewell", "failed"])
def test_nobody_is_waited_for_in_vain(case: str) -> None:
    left_at = {} if case == "nobody left" else {"ada": 100.0 - (2 * GRACE_S if case == "long ago" else 0)}
    coordinator = ended(left_at, FederationFailed("broken") if case == "failed" else None)
    if case == "had its farewell":
        coordinator.state.streams.dismissed.add("ada")
    assert seconds_of(coordinator) < 10


def test_a_device_that_comes_and_goes_cannot_keep_the_server_from_ending() -> None:
    coordinator = ended({})
    coordinator.state.round.left_at = Leaving(coordinator.state.clock.monotonic)
    assert seconds_of(coordinator) < GRACE_S + 10


# --- `server.advertise`: the address in join lines and of the page, where the name of the machine is not known to devices

ANY = "0.0.0.0"  # noqa: S104 - an address to print


@pytest.mark.parametrize(
    ("host", "advertised", "joined"),
    [
        (ANY, "", f"{socket.gethostname()}:50051"),
        ("10.0.0.7", "", "10.0.0.7:50051"),
        (ANY, "fed.example", "fed.example:50051"),
        ("10.0.0.7", "fed.example:443", "fed.example:443"),
        (ANY, "[2001:db8::1]", "[2001:db8::1]:50051"),
        (ANY, "[2001:db8::1]:443", "[2001:db8::1]:443"),
        ("::1", "", "[::1]:50051"),
    ],
)  # fmt: skip
def test_join_lines_name_the_advertised_address(host, advertised, joined):
    assert ServedAddress(host, 50051, 1).joined(advertised) == joined


@pytest.mark.parametrize(
    "wrong", ["a b", "fed.example:", "fed.example:0", "fed.example:70000", "::1", "http://fed.example", ":5", "a\n"]
)
def test_a_text_that_is_no_address_is_refused_by_name(wrong):
    with pytest.raises(SettingError, match=r"server\.advertise"):
        convert(ServerSettings, {"advertise": wrong}, "server.")


def test_a_page_for_all_addresses_is_named_and_answers_by_the_advertised_host():
    assert PageAddress(ANY, 8080).url("t", "fed.example:443") == "http://fed.example:8080/?token=t"
    assert PageAddress("::", 8080).url("t", "[2001:db8::1]") == "http://[2001:db8::1]:8080/?token=t"
    assert PageAddress("127.0.0.1", 8080).url("t", "fed.example") == "http://127.0.0.1:8080/?token=t", (
        "the host cannot be there"
    )
    assert "fed.example" in names_of(ANY, "fed.example:443")
    assert "fed.example" in names_of("127.0.0.1", "fed.example"), "a proxy on this machine passes its name on"
