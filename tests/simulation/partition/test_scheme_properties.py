"""Properties of every scheme: no sample twice, equal classes in both parts, and the seed decides."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.simulation.partition.samples import Dataset, Source, corpus
from attune.simulation.partition.schemes import registry
from attune.simulation.partition.split import Partition, partition

SAME_CLASSES = {
    "iid",
    "pathological",
    "dirichlet",
    "coarse5",
    "counts",
    "two-class-unequal",
}  # by definition in both parts of a client


@dataclass(frozen=True)
class Case:
    source: Source | None
    clients: int | None
    settings: dict[str, Any]


@st.composite
def data_sets(draw: st.DrawFn) -> Dataset:
    """Draw data sets with equally many fine classes in each coarse one, and a person for each sample."""
    groups, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    classes = groups * each
    train = np.repeat(np.arange(classes), draw(st.lists(st.integers(60, 120), min_size=classes, max_size=classes)))
    test = np.repeat(np.arange(classes), draw(st.lists(st.integers(40, 60), min_size=classes, max_size=classes)))
    both = np.concatenate([train, test])
    persons = np.random.default_rng(draw(st.integers(0, 9))).integers(0, draw(st.integers(1, 5)), len(both))
    more = {"coarse": both % groups, "client": persons}
    x = np.arange(len(both), dtype=np.float32)[:, None]
    return Dataset("drawn", "tabular", x[: len(train)], train, x[len(train) :], test, list(range(classes)), 0, more=more)


@st.composite
def cases(draw: st.DrawFn, scheme: str, folder: Path) -> Case:
    if scheme == "synthetic":
        return Case(None, draw(st.integers(1, 3)), {"features": 3, "classes": draw(st.integers(2, 4))})
    if scheme == "roles":
        words = st.text("ab \n", min_size=30, max_size=60)
        said = [(f"R{number}", text) for number, text in enumerate(draw(st.lists(words, min_size=12, max_size=14)))]
        target = draw(st.sampled_from(["each", "last"]))
        return Case(corpus("play", said), 6, {"window": 4, "target": target, "stride": draw(st.integers(0, 6))})
    data = draw(data_sets())
    classes = len(data.classes)
    if scheme in ("pathological", "two-class-unequal"):
        # At most 4 owners for a class of 100 samples and more, so that each gets enough to be cut again.
        each = draw(st.integers(1, min(classes, 2) if scheme == "two-class-unequal" else classes))
        clients = draw(st.integers(1, 2)) * classes // np.gcd(classes, each)
        return Case(data, int(clients), {"classes_per_client": each})
    if scheme == "coarse5":
        return Case(data, None, {"siblings": draw(st.integers(1, 4))})
    if scheme == "counts":
        number = draw(st.integers(1, 4))
        most = int(np.bincount(data.class_indices()).min()) // number
        rows = [f"{client},{label},{draw(st.integers(8, most))}" for client in range(number) for label in data.classes]
        (folder / "counts.csv").write_text("\n".join(["client,label,samples", *rows]), encoding="utf-8")
        return Case(data, None, {"table": str(folder / "counts.csv")})
    if scheme == "natural":
        return Case(data, None, {"split": "random"})
    return Case(data, draw(st.integers(1, 4)), {"alpha": 2.0} if scheme in ("dirichlet", "pachinko") else {})


def cut(scheme: str, case: Case, seed: int) -> Partition:
    return partition(case.source, scheme, case.clients, seed, **case.settings)


def everything(parts: Partition) -> list[bytes]:
    """Return all that would be written, and the clients that get it."""
    arrays = [parts.arrays(client, part) for client in range(len(parts.names)) for part in ("train", "test")]
    return [name.encode() for name in parts.names] + [array.tobytes() for pair in arrays for array in pair]


@pytest.mark.parametrize("scheme", registry.SCHEMES)
def test_what_holds_for_every_scheme(scheme: str, tmp_path: Path) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(cases(scheme, tmp_path), st.integers(0, 99))
    def check(case: Case, seed: int) -> None:
        parts = cut(scheme, case, seed)
        taken = np.concatenate([*parts.train, *parts.test])
        assert len(np.unique(taken)) == len(taken) and taken.min() >= 0 and taken.max() < len(parts.dataset)
        assert len({len(parts.names), len(parts.train), len(parts.test), len(set(parts.names))}) == 1
        assert case.clients in (None, len(parts.names))
        assert all(len(cut) and (np.diff(cut) > 0).all() for cut in parts.train)
        if scheme in SAME_CLASSES:
            assert np.array_equal(parts.counts("train") > 0, parts.counts("test") > 0)
        assert parts.counts("train").sum() == sum(parts.arrays(client, "train")[1].size for client in range(len(parts.names)))
        assert everything(parts) == everything(cut(scheme, case, seed))
        shared = ((parts.counts() > 0).sum(axis=0) > 1).any()  # otherwise there may be only a few ways to cut at all
        if shared or scheme in ("synthetic", "natural"):
            assert everything(parts) != everything(cut(scheme, case, seed + 1))

    check()
