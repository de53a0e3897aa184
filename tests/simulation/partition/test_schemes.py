"""Each scheme against counts by hand or published ones."""

from pathlib import Path

import numpy as np
import pytest

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.makers.alphabets import CHARACTERS
from attune.fedclient.data.shard import load_shard
from attune.simulation.partition.datasets import load_source
from attune.simulation.partition.samples import corpus
from attune.simulation.partition.schemes import registry
from attune.simulation.partition.schemes.counts import sizes as unequal_sizes
from attune.simulation.partition.schemes.cut import grouped, stratified
from attune.simulation.partition.schemes.natural import folders
from attune.simulation.partition.schemes.scheme_settings import SyntheticSettings
from attune.simulation.partition.schemes.shares import draw
from attune.simulation.partition.schemes.synthetic import samples
from attune.simulation.partition.schemes.synthetic import sizes as power_law
from attune.simulation.partition.split import partition, write_shards

MNIST = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]  # images of each digit, both parts
FASHION = [7000] * 10


def with_coarse(dataset_of, counts, coarse):
    """Return `dataset_of(counts)` with the coarse class of every class, as an array by sample."""
    data = dataset_of(counts)
    index = data.class_indices()
    return dataset_of(counts, {"coarse": np.asarray(coarse)[index]})


def test_every_scheme_is_found_by_name():
    assert len(registry.SCHEMES) == 10
    assert all(callable(registry.get(name).function()) for name in registry.SCHEMES)


# --- two-class-unequal ---


def test_two_class_unequal_has_the_published_sizes(dataset_of):
    parts = partition(dataset_of([(count - 1000, 1000) for count in MNIST]), "two-class-unequal", seed=1, normalise="none")
    train_N = parts.counts("train").sum(axis=1)
    assert (len(parts.names), train_N.min(), train_N.max()) == (20, 1167, 3834)
    both_NC = parts.counts("train") + parts.counts("test")
    assert both_NC.sum(axis=0).tolist() == MNIST
    for client, (train_C, both_C) in enumerate(zip(parts.counts("train"), both_NC, strict=True)):
        assert np.flatnonzero(both_C).tolist() == sorted({2 * client % 10, (2 * client + 1) % 10})
        assert np.array_equal(np.flatnonzero(train_C), np.flatnonzero(both_C))
        assert train_C.sum() == int(0.75 * both_C.sum()) and (np.abs(train_C - 0.75 * both_C) < 1).all()
    # The first client owns the first pieces of the classes 0 and 1; their sizes with this seed are known.
    assert both_NC[0, :2].tolist() == [2441, 2671] and both_NC[5, :2].tolist() == [1127, 1946]


def test_two_class_unequal_by_hand():
    class Low:
        def randint(self, low: int, high: int) -> int:
            assert low < high
            return low

    class High:
        def randint(self, low: int, high: int) -> int:
            return high - 1

    assert unequal_sizes([100], 4, Low()).tolist() == [[20, 16, 12, 52]]
    assert unequal_sizes([100], 4, High()).tolist() == [[49, 24, 12, 15]]
    with pytest.raises(SettingError, match="too small for its 4 clients"):
        unequal_sizes([4], 4, Low())


def test_two_class_unequal_standardises_each_pixel_over_both_parts(dataset_of):
    parts = partition(dataset_of([(300, 100)] * 10), "two-class-unequal", seed=2)
    x = np.concatenate([parts.arrays(client, part)[0] for client in range(20) for part in ("train", "test")])
    assert len(x) == 4000 and abs(x.mean()) < 1e-5 and abs(x.std() - 1) < 1e-5


@pytest.mark.parametrize(("clients", "each"), [(7, 2), (20, 11)])
def test_two_class_unequal_refusals(dataset_of, clients, each):
    with pytest.raises(SettingError, match="classes-per-client"):
        partition(dataset_of([(90, 30)] * 10), "two-class-unequal", clients, classes_per_client=each)


# --- counts ---


def counts_file(folder: Path, rows: str) -> str:
    path = folder / "counts.csv"
    path.write_text(rows, encoding="utf-8")
    return str(path)


def test_counts_gives_each_client_what_the_table_says(dataset_of, tmp_path):
    table = counts_file(tmp_path, "client,label,samples\nb,0,8\nb,20,4\na,0,2\na,10,30\n")
    parts = partition(dataset_of([(5, 5), (20, 10), (4, 0)]), "counts", table=table)
    assert parts.names == ("shard-b", "shard-a")
    assert (parts.counts("train") + parts.counts("test")).tolist() == [[8, 0, 4], [2, 30, 0]]
    assert parts.counts("train")[0].tolist() == [6, 0, 3] and parts.counts("train")[1].sum() == 24
    assert len({*parts.train[0], *parts.test[0], *parts.train[1], *parts.test[1]}) == 44, "without replacement"
    assert partition(dataset_of([(5, 5), (20, 10), (4, 0)]), "counts", 2, table=table).names == parts.names


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("client,label\n0,0\n", "has no column samples"),
        ("client,label,samples\n0,7,1\n", "line 2: made has no class '7'; it has 0, 10"),
        ("client,label,samples\n0,0,-1\n", "whole number"),
        ("client,label,samples\n0,0,2.5\n", "whole number"),
        ("client,label,samples\n,0,2\n", "a client and"),
        ("client,label,samples\n0,0,1\n0,0,1\n", "line 3: client 0 has label 0 twice"),
        ("client,label,samples\n0,0,41\n", "asks for 41 samples of class 0, and made has 40"),
        ("client,label,samples\n", "has no rows"),
        ("client,label,samples\n0,0,0\n1,0,9\n", "some would get none"),
    ],
)
def test_counts_refuses_a_table_that_does_not_fit(dataset_of, tmp_path, rows, said):
    with pytest.raises(SettingError, match=said):
        partition(dataset_of([(30, 10)] * 2), "counts", table=counts_file(tmp_path, rows))


def test_counts_says_what_it_needs(dataset_of, tmp_path):
    data = dataset_of([(30, 10)] * 2)
    with pytest.raises(SettingError, match="needs a table"):
        partition(data, "counts")
    with pytest.raises(SettingError, match=r"cannot read .*nowhere.csv: No such file"):
        partition(data, "counts", table=str(tmp_path / "nowhere.csv"))
    with pytest.raises(SettingError, match="--clients is 3"):
        partition(data, "counts", 3, table=counts_file(tmp_path, "client,label,samples\n0,0,9\n"))


def test_the_committed_table_of_pfllib_uses_every_image_once():
    table = Path(__file__).parents[3] / "benchmarks" / "papers" / "pfllib_fmnist_counts.csv"
    client, label, samples = np.loadtxt(table, delimiter=",", skiprows=1, dtype=int).T
    assert np.bincount(label, samples).tolist() == FASHION and client.max() == 19


# --- synthetic ---


def test_synthetic_has_the_published_sizes():
    assert (power_law(100, 0).min(), power_law(100, 0).max(), power_law(100, 0).sum()) == (250, 25_810, 205_795)


def test_synthetic_shards_have_these_sizes():
    parts = partition(None, "synthetic", 6, seed=3, test=0.1)
    made = [len(train) + len(test) for train, test in zip(parts.train, parts.test, strict=True)]
    assert made == power_law(6, 3).tolist()
    assert [len(train) for train in parts.train] == [int(0.9 * size) for size in made]
    x, y = parts.arrays(2, "train")
    assert x.shape == (int(0.9 * made[2]), 60) and x.dtype == np.float32 and set(np.unique(y)) <= set(range(10))
    assert parts.dataset.classes == list(range(10))


def test_synthetic_features_stay_as_they_are_even_when_a_shard_is_cut_again(tmp_path):
    folder = write_shards(tmp_path / "all", partition(None, "synthetic", 2, seed=3))[1]
    assert not load_shard(folder).standardise and not load_source(str(folder), 0).standardise


def test_synthetic_features_have_the_variances_that_are_meant():
    x, _ = samples(40_000, SyntheticSettings(), np.random.default_rng(0))
    assert np.allclose(x.var(axis=0), np.arange(1, 61) ** -1.2, rtol=0.05)


@pytest.mark.parametrize(
    ("beta", "expected"), [(0.0, np.sqrt(1 / 60)), (0.5, np.sqrt(0.25 + 1 / 60)), (2.0, np.sqrt(4 + 1 / 60))]
)
def test_synthetic_beta_is_the_deviation_of_the_feature_means(beta, expected):
    settings = SyntheticSettings(beta=beta)
    # B_i and the mean of 60 draws from N(B_i, 1): variances beta^2 and 1/60; 50 samples add almost nothing.
    means = [samples(50, settings, np.random.default_rng([9, client]))[0].mean() for client in range(1500)]
    assert np.std(means) == pytest.approx(expected, rel=0.06)


def test_synthetic_labels_by_a_loop():
    settings = SyntheticSettings(alpha=0.7, beta=0.3, features=4, classes=3)
    x, y = samples(5, settings, np.random.default_rng(5))
    again = np.random.default_rng(5)
    u, _ = again.normal(0, 0.7), again.normal(0, 0.3)
    weight = [[again.normal(u, 1) for _ in range(3)] for _ in range(4)]
    bias = [again.normal(u, 1) for _ in range(3)]
    for features, label in zip(x.tolist(), y.tolist(), strict=True):
        score = [sum(f * row[c] for f, row in zip(features, weight, strict=True)) + bias[c] for c in range(3)]
        assert label == score.index(max(score))


# --- coarse classes ---


def test_coarse5_on_a_tenth_of_the_shape_of_cifar100(dataset_of):
    coarse = (np.arange(100) * 7) % 20  # five fine classes to each of twenty, not side by side
    data = with_coarse(dataset_of, [(50, 10)] * 100, coarse)
    parts = partition(data, "coarse5")
    train_NC, test_NC = parts.counts("train"), parts.counts("test")
    for client in range(100):
        mine = np.flatnonzero(coarse == client // 5)
        assert (train_NC[client, mine] == 10).all() and (test_NC[client, mine] == 2).all()
        assert train_NC[client].sum() == 50 and test_NC[client].sum() == 10
    harder = partition(data, "coarse5", 100, each="one-class")
    for client in range(100):
        owned = np.flatnonzero(harder.counts()[client])
        assert owned.tolist() == [np.flatnonzero(coarse == client // 5)[client % 5]]
        assert harder.counts("train")[client].sum() == 50 and harder.counts("test")[client].sum() == 10


def test_coarse_refusals(dataset_of):
    data = with_coarse(dataset_of, [(50, 20)] * 6, [0, 0, 0, 1, 1, 1])
    with pytest.raises(SettingError, match="make 10; leave --clients out"):
        partition(data, "coarse5", 6)
    with pytest.raises(SettingError, match="has 3 classes, not one for each of 5"):
        partition(data, "coarse5", each="one-class")
    with pytest.raises(SettingError, match=r"no label array 'corse' \(did you mean 'coarse'"):
        partition(data, "pachinko", 2, coarse="corse")
    with pytest.raises(SettingError, match="it has no labels but its classes"):
        partition(dataset_of([(50, 20)] * 6), "pachinko", 2)
    split = dataset_of([(4, 4)] * 2, {"coarse": np.arange(16) % 2})
    with pytest.raises(ShardError, match="class 0 of made lies in 2 coarse classes"):
        partition(split, "pachinko", 2)
    with pytest.raises(SettingError, match="some drew no"):
        partition(with_coarse(dataset_of, [(5, 1)] * 2, [0, 1]), "pachinko", 4)


def test_pachinko_gives_everyone_the_same_number(dataset_of):
    data = with_coarse(dataset_of, [(50, 10)] * 20, np.repeat(np.arange(4), 5))
    parts = partition(data, "pachinko", 7, seed=4, alpha=0.5)
    sizes = [len(train) + len(test) for train, test in zip(parts.train, parts.test, strict=True)]
    assert sizes == [1200 // 7] * 7
    assert all((train < 1000).all() and (test >= 1000).all() for train, test in zip(parts.train, parts.test, strict=True))


def test_pachinko_draws_by_hand():
    parent, rng = np.array([0, 0, 1]), np.random.default_rng(0)
    everything = draw(np.array([1.0, 0.0]), np.array([0.5, 0.5, 1.0]), parent, np.array([3, 2, 4]), 7, rng)
    assert everything.tolist() == [3, 2, 2]  # the other coarse class only when the first one is used up
    # Fine class 0 is used up, so its sibling has all of their coarse class: a half, not 0.05 / 0.55.
    taken = draw(np.array([0.5, 0.5]), np.array([0.9, 0.1, 1.0]), parent, np.array([0, 10**6, 10**6]), 10_000, rng)
    assert taken[0] == 0 and abs(taken[1] - 5000) < 200
    # One sample of class 0: drawn first with 0.45, or second with 0.55 * 0.45.
    many = np.array(
        [draw(np.array([0.5, 0.5]), np.array([0.9, 0.1, 1.0]), parent, np.array([1, 9, 9]), 2, rng) for _ in range(4000)]
    )
    assert many[:, 0].mean() == pytest.approx(0.45 + 0.55 * 0.45, abs=0.03)
    assert many[:, 2].mean() == pytest.approx(1.0, abs=0.05)


# --- natural clients ---


def natural_data(dataset_of, whose, counts=((8, 0), (4, 0)), **more):
    return dataset_of(list(counts), {"person": np.asarray(whose), **more})


def test_natural_clients_keep_their_proportions(dataset_of):
    # 8 samples of class 0 and 4 of class 10; person 7 has 4 + 4, person 12 the rest
    data = natural_data(dataset_of, [7] * 4 + [12] * 4 + [7] * 4)
    parts = partition(data, "natural", by="person")
    assert parts.names == ("shard-person7", "shard-person12")
    assert parts.counts("train").tolist() == [[3, 3], [3, 0]] and parts.counts("test").tolist() == [[1, 1], [1, 0]]


def test_natural_split_in_time_and_by_group(dataset_of):
    data = natural_data(dataset_of, [1] * 12, run=np.array([0, 0, 1, 1, 2, 2, 3, 3, 8, 8, 9, 9]))
    late = partition(data, "natural", by="person", split="time", test=0.3)
    assert late.test[0].tolist() == [8, 9, 10, 11]
    # The border lies within the run 8, which stays in the training part as a whole.
    assert partition(data, "natural", by="person", split="time", test=0.2, group="run").test[0].tolist() == [10, 11]
    for seed in range(5):
        chosen = partition(data, "natural", by="person", group="run", seed=seed)
        assert chosen.counts("test").tolist() == [[2, 2]]  # one run of each class
        assert set(chosen.test[0] // 2).isdisjoint(chosen.train[0] // 2)


def test_natural_with_a_given_test_part(dataset_of):
    whose = ["b", "a", "b", "c", "a", "b", "a", "b", "d"]  # 5 to train, 4 to test
    data = dataset_of([(5, 4)], {"client": np.array(whose)})
    parts = partition(data, "natural")
    assert parts.names == ("shard-a", "shard-b")
    assert [train.tolist() for train in parts.train] == [[1, 4], [0, 2]]
    assert [test.tolist() for test in parts.test] == [[6], [5, 7]]
    assert parts.notes[0].startswith("2 of 4 clients are left out")
    assert len(partition(data, "natural", split="random", at_least=3).names) == 2
    assert len(partition(data, "natural", 1).names) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"by": "persn"}, "did you mean 'person'"),
        ({"by": "person", "group": "runs"}, "no label array 'runs'"),
        ({"by": "person", "split": "given"}, "has no test part"),
        ({"by": "person", "at_least": 100}, "fewer than 100 samples"),
        ({"by": "person", "clients": 3}, "there are 2 clients"),
        ({"by": "person", "split": "tme"}, "tme"),
    ],
)
def test_natural_refusals(dataset_of, settings, message):
    with pytest.raises(SettingError, match=message):
        partition(natural_data(dataset_of, [7] * 4 + [12] * 4 + [7] * 4), "natural", **settings)


def test_groups_of_the_split_are_groups_of_the_shards(dataset_of, tmp_path):
    person, run = np.repeat([0, 1], 12), np.arange(24) // 3
    data = dataset_of([(24, 0)], {"person": person, "run": run})
    parts = partition(data, "natural", by="person", group="run")
    for folder, train, test in zip(write_shards(tmp_path, parts), parts.train, parts.test, strict=True):
        shard = load_shard(folder)
        assert (shard.groups.tolist(), shard.test_groups.tolist()) == (run[train].tolist(), run[test].tolist())


def test_stratified_and_grouped_by_hand():
    y = np.array([0] * 8 + [1] * 4)
    assert np.bincount(y[stratified(y, 0.25, np.random.default_rng(0))]).tolist() == [2, 1]
    # class 0: runs of 6, 2 and 2 samples, a quarter of ten wanted; class 1: a single run, never tested on
    y, run = np.array([0] * 10 + [1] * 3), np.array([0] * 6 + [1] * 2 + [2] * 2 + [3] * 3)
    for seed in range(10):
        mask = grouped(y, run, 0.25, np.random.default_rng(seed))
        assert not mask[10:].any() and 2 <= mask.sum() <= 6
        assert len(set(run[mask])) in (1, 2) and set(run[mask]).isdisjoint(run[~mask])


def test_folder_names_are_all_different():
    assert folders(["VA Long Beach", "va-long-beach", "ä", "va long beach 2", "va long beach", "x" * 99]) == (
        "shard-va-long-beach", "shard-va-long-beach-2", "shard-client", "shard-va-long-beach-2-2",
        "shard-va-long-beach-3", "shard-" + "x" * 40,
    )  # fmt: skip


# --- roles ---

LINES = "To be, or not to be, that is t"  # 30 characters: 24 for training, 6 for testing


def read_back(tokens) -> str:
    return "".join(CHARACTERS[token] for token in np.ravel(tokens))


def test_roles_by_hand():
    text = corpus("play", [("GHOST", "Swear."), ("HAMLET", LINES)])
    parts = partition(text, "roles", window=5)
    assert parts.names == ("shard-hamlet",) and parts.notes[0].startswith("1 of 2 roles")
    x, y = parts.arrays(0, "train")
    assert [read_back(row) for row in x] == ["To be", ", or ", "not t", "o be,"]
    assert [read_back(row) for row in y] == ["o be,", " or n", "ot to", " be, "]
    x, y = parts.arrays(0, "test")
    assert ([read_back(row) for row in x], [read_back(row) for row in y]) == ([LINES[24:29]], [LINES[25:30]])
    assert y.shape == x.shape and parts.dataset.vocabulary == 100 and parts.dataset.classes == list(range(100))
    assert parts.counts()[0].sum() == 20  # positions


def test_roles_with_the_last_characters_successor():
    parts = partition(corpus("play", [("HAMLET", LINES)]), "roles", window=5, target="last")
    x, y = parts.arrays(0, "train")
    assert x.shape == (19, 5) and y.shape == (19,)
    assert all(
        LINES[n : n + 5] == read_back(row) and LINES[n + 5] == CHARACTERS[c]
        for n, (row, c) in enumerate(zip(x, y, strict=True))
    )
    assert partition(corpus("play", [("HAMLET", LINES)]), "roles", window=5, target="last", stride=4).counts().sum() == 5


def test_roles_refusals(dataset_of):
    text = corpus("play", [("A", LINES), ("B", LINES)])
    with pytest.raises(SettingError, match="no role of play has enough text"):
        partition(text, "roles")
    with pytest.raises(SettingError, match="no role of play"):
        partition(text, "roles", window=5, at_least=31)
    with pytest.raises(SettingError, match="with enough text there are 2"):
        partition(text, "roles", 3, window=5)
    with pytest.raises(SettingError, match="cut it with --scheme roles"):
        partition(text, "iid", 2)
    with pytest.raises(SettingError, match="cannot be normalised or get noise"):
        partition(text, "roles", window=5, noise=1.0)
    with pytest.raises(SettingError, match="needs a data set"):
        partition(None, "iid", 2)
