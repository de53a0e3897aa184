"""Normal numbers on a lattice: their chances are those of a discrete Gaussian, and sums of them tell nothing by their gaps."""

import math

import numpy as np
import numpy.typing as npt
import pytest

from attune.common.errors import SettingError
from attune.common.privacy.noise import NoiseStream, key_of
from attune.fedclient.work.private import lattice
from attune.fedclient.work.private.lattice import CELLS, DEVIATION, LARGEST, PLACES, LatticeStream, lattice_step

SECRET = b"s" * 32


def stream(*context: str | int) -> LatticeStream:
    return LatticeStream(NoiseStream(key_of(SECRET, *context)))


def drawn(*context: str | int, count: int = 1 << 19) -> npt.NDArray[np.int64]:
    return stream(*context).numbers(count).numpy().astype(np.int64)


def test_cells_of_the_table_and_rare_ones_have_the_chances_of_the_proposal() -> None:
    """Entries of the table count for 2^-16 each; the rest of a cell's chance is with the rare entries."""
    table, rare_sums, sums, surely = lattice._tables()
    cells = np.arange(-10 * CELLS, 10 * CELLS)
    nearest = np.minimum(np.abs(cells * PLACES), np.abs((cells + 1) * PLACES - 1))  # the likeliest place of a cell
    wanted = np.exp(-((nearest / DEVIATION) ** 2) / 2)
    wanted /= wanted.sum()
    rare = int((table == lattice._RARE).sum())
    in_table = np.bincount(table[table != lattice._RARE].astype(np.int64) + 10 * CELLS, minlength=len(cells)) / 2**16
    assert rare_sums[-1] == pytest.approx(rare, abs=1e-9)
    assert np.allclose(in_table + rare / 2**16 * np.diff(rare_sums, prepend=0) / rare_sums[-1], wanted, rtol=0, atol=1e-15)
    assert np.allclose(np.diff(sums, prepend=0) / sums[-1], wanted, rtol=0, atol=1e-15)
    for cell in cells[in_table > 0][[0, -1]].tolist():  # what is not judged would have been accepted
        ends = np.array([cell * PLACES, (cell + 1) * PLACES - 1])
        assert surely / 2**16 <= lattice._ratio(np.array([cell, cell]), ends).min()


def test_numbers_have_the_moments_and_tails_of_normals() -> None:
    numbers = drawn("run", 1, count=1 << 21)
    z = numbers / DEVIATION
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        error = 5 * math.sqrt((z ** (2 * power)).mean() / len(z))
        assert (z**power).mean() == pytest.approx(moment, abs=error)
    for bound in (0.5, 1, 2, 3, 4, 4.5):
        share = math.erfc(bound / math.sqrt(2))
        assert (np.abs(z) > bound).mean() == pytest.approx(share, abs=5 * math.sqrt(share / len(z)))


def test_the_place_in_a_cell_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With wide cells the slope within them is large; the numbers still have the chances of the bell."""
    monkeypatch.setattr(lattice, "DEVIATION", 4 * PLACES)
    monkeypatch.setattr(lattice, "CELLS", 4)
    monkeypatch.setattr(lattice, "_FURTHEST", 40)
    for name, value in zip(("_TABLE", "_RARE_SUMS", "_SUMS", "_SURELY"), lattice._tables(), strict=True):
        monkeypatch.setattr(lattice, name, value)
    numbers = drawn("wide")
    edges = np.arange(-12 * PLACES, 12 * PLACES + 1, PLACES // 4)
    points = np.arange(-16 * PLACES, 16 * PLACES)
    chance = np.exp(-((points / (4 * PLACES)) ** 2) / 2)
    wanted, _ = np.histogram(points, edges, weights=chance / chance.sum())
    counts, _ = np.histogram(numbers, edges)
    square = ((counts - wanted * len(numbers)) ** 2 / (wanted * len(numbers))).sum()
    assert square < len(wanted) + 5 * math.sqrt(2 * len(wanted))


def test_numbers_are_independent_of_each_other_and_of_those_of_other_keys() -> None:
    one, other = drawn("run", 2) / DEVIATION, drawn("run", 3) / DEVIATION
    limit = 5 / math.sqrt(len(one))
    for apart in (1, 2, 3, 7, LARGEST // 2, LARGEST):
        for a, b in ((one[:-apart], one[apart:]), (one[:-apart] ** 2, one[apart:] ** 2)):
            assert abs(np.corrcoef(a, b)[0, 1]) < limit
    assert abs(np.corrcoef(one, other)[0, 1]) < limit
    assert np.array_equal(one, drawn("run", 2) / DEVIATION)


def test_a_lattice_stream_does_not_depend_on_the_sizes_of_its_requests() -> None:
    sizes = (0, 1, 4095, 5000, LARGEST, 7)
    pieces = stream("sizes")
    got = [pieces.numbers(size).numpy().copy() for size in sizes]
    assert [len(piece) for piece in got] == list(sizes)
    assert np.array_equal(np.concatenate(got), drawn("sizes", count=sum(sizes)))


def test_the_noise_makes_up_for_rounding_to_the_lattice() -> None:
    """Check by hand: 4 numbers move half a step each, twice, so they are 2 steps apart; DEVIATION steps are one deviation."""
    step = lattice_step(0.5, 2.0, 4)
    moved = 0.5 + step * math.sqrt(4)
    assert step * DEVIATION / moved == pytest.approx(2.0, rel=1e-12)
    with pytest.raises(SettingError, match="too large for a model with 1000000 values"):
        lattice_step(1.0, 1e4, 1_000_000)
