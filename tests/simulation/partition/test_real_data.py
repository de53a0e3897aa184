"""The published data sets, from ATTUNE_DATA or ../shared/data. Skipped if they are not there."""

import os
from pathlib import Path

import numpy as np
import pytest

from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.datasets import load_source
from attune.simulation.partition.samples import Corpus, Dataset
from attune.simulation.partition.split import partition

DATA = Path(os.environ.get("ATTUNE_DATA", Path(__file__).parents[4] / "shared" / "data"))


@pytest.fixture
def path():
    """Return a function that finds a file, such as "mnist/mnist.npz", and skips the test if it does not exist."""

    def find(name: str) -> str:
        if not (DATA / name).exists():
            pytest.skip(f"no {name} under {DATA}; ATTUNE_DATA says where the data sets are")
        return str(DATA / name)

    return find


def test_mnist_by_two_classes(path):
    data = load_source(path("mnist/mnist.npz"))
    assert isinstance(data, Dataset) and (len(data.train_y), len(data.test_y), data.kind) == (60_000, 10_000, "images")
    parts = partition(data, "two-class-unequal", seed=1)
    sizes = [len(train) for train in parts.train]
    assert (min(sizes), max(sizes)) == (1167, 3834)


def test_every_person_of_uci_har_and_no_segment_in_both_parts(path):
    data = load_source(path("uci-har/uci_har.npz"))
    assert isinstance(data, Dataset) and data.kind == "series" and len(data) == 10_299
    parts = partition(data, "natural", by="subject", group="segment")
    sizes = [len(train) + len(test) for train, test in zip(parts.train, parts.test, strict=True)]
    assert (len(sizes), min(sizes), max(sizes), sum(sizes)) == (30, 281, 409, 10_299)
    segment, subject = data.further("segment"), data.further("subject")
    for train, test in zip(parts.train, parts.test, strict=True):
        assert not set(segment[train]) & set(segment[test]) and len(set(subject[np.concatenate([train, test])])) == 1
    assert np.array_equal(parts.counts("train") > 0, parts.counts("test") > 0)
    assert 0.2 < sum(map(len, parts.test)) / 10_299 < 0.3


def test_heart_disease_by_hospital(path):
    data = load_source(path("heart-disease/heart_disease.npz"), options=ReadOptions.of("num>0", missing="median"))
    assert isinstance(data, Dataset)
    parts = partition(data, "natural", by="hospital")
    assert parts.names == ("shard-cleveland", "shard-hungarian", "shard-switzerland", "shard-va")
    both_NC = parts.counts("train") + parts.counts("test")
    assert both_NC.tolist() == [[164, 139], [188, 106], [8, 115], [51, 149]]


def test_the_roles_of_shakespeare(path):
    listed, plays = load_source(path("shakespeare/roles.tsv.gz")), load_source(path("shakespeare/plays"))
    assert isinstance(listed, Corpus) and isinstance(plays, Corpus) and len(listed) == 1335
    # 4.18 million characters, and a line end between the lines of a role, of which there are 107,639 in all.
    assert len(listed.tokens) == 4_290_660 and round((len(listed.tokens) - 107_639 + 1335) / 1e6, 2) == 4.18
    assert set(listed.roles) <= set(plays.roles) and len(plays) == 1347  # the plays also have a prologue and an induction
    parts = partition(listed, "roles")
    lengths = np.diff(listed.starts)
    # 80 + 1 characters of each part: the last fifth, rounded up, decides.
    assert len(parts.names) == sum(length - int(length * 0.8 + 1e-9) >= 81 for length in lengths.tolist())
