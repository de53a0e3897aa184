"""Product files on the way of one update, counted while a small federation runs under a profiler.

Two devices are simulated. Their second round is recorded: from the moment when both devices are done with the first round to
the moment when both are done with the second. So it contains one whole turn (order, training, upload, checks, aggregation, next
order), but neither start nor end nor imports. A file is *entered* when one of its functions runs. It *hands on* when one of its
functions also calls, directly or through a library other than asyncio, a function of another product file. The other files are
leaves, such as `common/seeds.py`, which a reader can take as given. The way of an update is the files that hand on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType

import numpy as np

METHOD = "fedtp"
DEVICES, ROUNDS, RECORDED = 2, 5, 2  # five rounds, since all devices also evaluate after the last ones
_LOOPS = tuple(module.__path__[0] for module in (asyncio, concurrent.futures))  # these call functions of others
PACKAGES = ("seams.py", "common", "features", "fedserver", "fedclient", "simulation", "contrib")


class Way:
    """Calls between product files, noted on all threads while `recording` is true.

    Attributes:
        entered: The files of which a function ran.
        crossings: Pairs of files: the caller's and that of the function it called.
    """

    def __init__(self, root: Path, packages: Sequence[str] = PACKAGES) -> None:
        self.recording = False
        self.entered: set[str] = set()
        self.crossings: set[tuple[str, str]] = set()
        self._file_of = cache(lambda name: _product_file(Path(name), root, packages))

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note the function that is entered; the interpreter calls this."""
        if not self.recording or event != "call" or frame.f_code.co_name == "<module>":
            return
        file = self._file_of(frame.f_code.co_filename)
        if file is None:
            return
        self.entered.add(file)
        caller = self._caller(frame.f_back)
        if caller not in (None, file):
            self.crossings.add((str(caller), file))

    def _caller(self, frame: FrameType | None) -> str | None:
        while frame is not None and not frame.f_code.co_filename.startswith(_LOOPS):
            file = self._file_of(frame.f_code.co_filename)
            if file is not None:
                return file
            frame = frame.f_back
        return None

    @property
    def handing_on(self) -> list[str]:
        """Files that call another product file, sorted."""
        return sorted({caller for caller, _ in self.crossings})

    @property
    def leaves(self) -> list[str]:
        """Files that were entered and call no other product file, sorted."""
        return sorted(self.entered - set(self.handing_on))


def _product_file(path: Path, root: Path, packages: Sequence[str]) -> str | None:
    path = path.resolve()
    if not path.is_relative_to(root):
        return None
    relative = path.relative_to(root)
    return str(relative) if relative.parts[0] in packages else None


def of_an_update(root: Path, method: str = METHOD) -> Way:
    """Return what one round of a simulated federation runs through; `attune` must be that of `root`."""
    import attune

    way, orders = Way(root.resolve()), 0

    def carried_out(share: float) -> None:
        nonlocal orders
        orders += 1
        way.recording = (RECORDED - 1) * DEVICES <= orders < RECORDED * DEVICES

    rng = np.random.default_rng(0)
    shards = {f"device-{n}": (rng.normal(size=(20, 4)).astype(np.float32), np.arange(20) % 2) for n in range(DEVICES)}
    threading.setprofile(way)
    sys.setprofile(way)
    try:
        attune.simulate(shards, method=method, rounds=ROUNDS, progress=carried_out)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return way


def main() -> None:
    """Print the way of an update as JSON, for the checkout whose root is the first argument."""
    way = of_an_update(Path(sys.argv[1]))
    print(json.dumps({"handing_on": way.handing_on, "leaves": way.leaves, "crossings": len(way.crossings)}))


if __name__ == "__main__":
    main()
