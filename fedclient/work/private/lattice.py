"""Normal numbers on a lattice, as whole numbers: noise of sums that are rounded to the same lattice.

Which sums of such numbers are possible does not depend on what they are added to, so the gaps between floating-point numbers
tell nothing (Canonne, Kamath, Steinke, 'The Discrete Gaussian for Differential Privacy', NeurIPS 2020). They are drawn exactly,
by rejection: a table gives a cell of the bell, and other bits give the place in it. Only few numbers need an exponential.
"""

from __future__ import annotations

import math
import threading

import numpy as np
import torch

from attune.common.errors import SettingError
from attune.common.privacy.noise import NoiseStream

CELLS = 256  # of one standard deviation
PLACES = 1 << 12  # of one cell
DEVIATION = CELLS * PLACES  # of the numbers
SMALLEST, LARGEST = 1 << 12, 1 << 18  # numbers of a block: the first is small, and each is twice as large as the one before
_BITS = 16  # that choose an entry of the table
_RARE = np.int16(np.iinfo(np.int16).min)  # entry: the cell follows from a number of 53 bits
_FURTHEST = 10 * CELLS


def _tables() -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return the table of cells; for rare and for all ones the sums of chances; the least draw whose place is to be judged."""
    cell_K = np.arange(-_FURTHEST, _FURTHEST)
    nearest_K = np.where(cell_K < 0, (cell_K + 1) * PLACES - 1, cell_K * PLACES)
    chance_K = np.exp(-0.5 * np.square(nearest_K / DEVIATION))
    chance_K *= (1 << _BITS) / chance_K.sum()
    whole_K = np.floor(chance_K).astype(np.int64)
    table = np.full(1 << _BITS, _RARE)
    table[: whole_K.sum()] = np.repeat(cell_K, whole_K)
    likely = np.abs(cell_K[whole_K > 0]).max() + 1
    surely = math.floor((1 << _BITS) * math.exp(-likely / CELLS**2))  # no place in a cell of the table is less likely
    return table, np.cumsum(chance_K - whole_K), np.cumsum(chance_K), surely


_TABLE, _RARE_SUMS, _SUMS, _SURELY = _tables()


class _Scratch(threading.local):
    """Memory in which a thread makes its blocks: fresh memory for each costs more than the numbers."""

    def __init__(self) -> None:
        self.stream_B = bytearray(6 * LARGEST)
        self.entry_N = np.empty(LARGEST, dtype=np.intp)
        self.cell_N = np.empty(LARGEST, dtype=np.int16)


_scratch = _Scratch()


class LatticeStream:
    """Independent normal numbers as whole numbers with the deviation DEVIATION, one after the other.

    Args:
        stream: Where the bits come from. Nothing else draws from it.
    """

    def __init__(self, stream: NoiseStream) -> None:
        self._stream, self._numbers, self._used = stream, np.empty(0, dtype=np.int32), 0

    def __repr__(self) -> str:
        return "LatticeStream(...)"

    def numbers(self, count: int) -> torch.Tensor:
        """Return so many numbers, (count,) int32. They may be in memory that the next call writes to."""
        pieces: list[np.ndarray] = []
        while not pieces or count:
            if self._used == len(self._numbers):
                self._fill(min(LARGEST, max(SMALLEST, 2 * len(self._numbers))))
            pieces.append(self._numbers[self._used : self._used + count])
            self._used, count = self._used + len(pieces[-1]), count - len(pieces[-1])
            if count:
                pieces[-1] = pieces[-1].copy()
        return torch.from_numpy(pieces[0] if len(pieces) == 1 else np.concatenate(pieces))

    def _fill(self, size: int) -> None:
        """Make so many numbers."""
        if len(self._numbers) != size:
            self._numbers = np.empty(size, dtype=np.int32)
        stream_B = memoryview(_scratch.stream_B)[: 6 * size]
        self._stream.fill(stream_B)
        entry_N, place_N, draw_N = np.frombuffer(stream_B, dtype="<u2").reshape(3, size)
        np.copyto(_scratch.entry_N[:size], entry_N)
        cell_N = np.take(_TABLE, _scratch.entry_N[:size], out=_scratch.cell_N[:size], mode="clip")
        place_N &= PLACES - 1
        np.multiply(cell_N, PLACES, out=self._numbers, dtype=np.int32)
        self._numbers += place_N
        judged = np.flatnonzero((cell_N == _RARE) | (draw_N >= _SURELY))
        self._numbers[judged] = self._judged(cell_N[judged].astype(np.int64), place_N[judged], draw_N[judged])
        self._used = 0

    def _judged(self, cell_N: np.ndarray, place_N: np.ndarray, draw_N: np.ndarray) -> np.ndarray:
        """Return the numbers of these cells and places, and others instead of those that are rejected."""
        rare = np.flatnonzero(cell_N == _RARE)
        which_N, judging_N = self._uniform(2, len(cell_N))
        cell_N[rare] = _cells(_RARE_SUMS, which_N[: len(rare)])
        number_N: np.ndarray = cell_N * PLACES + place_N
        left = np.flatnonzero((draw_N + judging_N) / (1 << _BITS) > _ratio(cell_N, number_N))
        while len(left):
            which_N, where_N, judging_N = self._uniform(3, len(left))
            cell_N = _cells(_SUMS, which_N)
            number_N[left] = cell_N * PLACES + np.ceil(where_N * PLACES).astype(np.int64) - 1
            left = left[judging_N > _ratio(cell_N, number_N[left])]
        return number_N

    def _uniform(self, rows: int, count: int) -> np.ndarray:
        drawn_RN: np.ndarray = self._stream.uniform(rows * count).view(rows, count).numpy()
        return drawn_RN


def _cells(sums_K: np.ndarray, which_N: np.ndarray) -> np.ndarray:
    """Return cells by the sums of their chances and a number from 0 to 1 for each."""
    cell_N: np.ndarray = np.searchsorted(sums_K, which_N * sums_K[-1]) - _FURTHEST
    return cell_N


def _ratio(cell_N: np.ndarray, number_N: np.ndarray) -> np.ndarray:
    """Return the chance of each number as a share of the largest in its cell."""
    nearest_N = cell_N * PLACES + (PLACES - 1) * (cell_N < 0)
    ratio_N: np.ndarray = np.exp((np.square(nearest_N / DEVIATION) - np.square(number_N / DEVIATION)) / 2)
    return ratio_N


def lattice_step(norm: float, noise: float, count: int) -> float:
    """Return the distance of the lattice's points, at which its noise has the multiplier `noise`.

    Rounding to it can move sums that differ by `norm` apart by sqrt(count) steps more, for which there is more noise.

    Args:
        norm: Most by which a unit moves the sums.
        noise: Noise multiplier.
        count: How many numbers are released together.

    Raises:
        SettingError: There are too many for so much noise.
    """
    rounding = noise * math.sqrt(count) / DEVIATION
    if rounding > 0.5:
        raise SettingError(
            f"a noise multiplier of {noise:.3g} is too large for a model with {count} values: raise privacy.epsilon"
        )
    return norm * noise / (1 - rounding) / DEVIATION
