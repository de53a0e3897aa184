"""`fedclient plot`: what finished models answer on a shard's test part, offline, as pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attune.common.errors import SettingError, ShardError
from attune.common.pictures import figures
from attune.common.pictures.figures import Format
from attune.common.plan import Label
from attune.features.finished import drawings
from attune.features.finished.drawings import over_patches
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.prepare import check_labelled_alike, y_of
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.light_model import in_unit
from attune.fedclient.read_options import PLAIN, ReadOptions


@dataclass(frozen=True)
class Judged:
    """One model on the test part of N samples. Answers are positions of labels in `classes`, (N,); of other tasks (N, K)."""

    title: str
    model: Model
    features: Tensor  # (N, ...), as the model takes them
    true: Array

    @cached_property
    def answers(self) -> Array:
        answers = self.model.answers_of(self.features)
        return answers.reshape(-1) if self.model.info.task == "classes" else answers

    def maps(self, chosen: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return the rollout over these samples, (len(chosen), h, w).

        For a blend it is that of the model with the largest weight.

        Raises:
            SettingError: The model has no attention that can be shown.
        """
        if self.model.info.model.kind != "images":
            raise SettingError(f"a rollout is over images, and this model takes {self.model.info.model.kind}")
        network = self.model.trainer.network
        x = self.features[list(chosen)].to(self.model.trainer.device)
        network.model.eval()
        with torch.no_grad():
            maps = over_patches(network.model, x.shape[-2], x.shape[-1], lambda: network(self.model.tensors, x))
        return np.asarray(maps)


@dataclass(frozen=True)
class Drawn:
    """Models and samples of the pictures. All models have the same classes."""

    shard: str
    classes: list[Label]
    judged: list[Judged]
    images: int


def rollout(source: Drawn) -> figures.Section:
    """Draw where each model looks."""
    first = source.judged[0]
    chosen = spread(first.true, source.images)
    maps = [judged.maps(chosen) for judged in source.judged]
    pictures = first.features[chosen].movedim(1, -1).numpy()
    names = [str(label) for label in source.classes]
    looks = [
        drawings.RolloutPanel(judged.title, map_, [names[k] for k in judged.answers[chosen]])
        for judged, map_ in zip(source.judged, maps, strict=True)
    ]
    return drawings.rollouts(pictures, chosen, [names[k] for k in first.true[chosen]], looks)


def areas(source: Drawn) -> figures.Section:
    """Draw images beside the true areas and those of each model."""
    first = source.judged[0]
    shape = (len(first.features), *first.model.info.model.positions)
    true = first.true.reshape(shape)
    chosen = sorted(np.argsort(~(true > 0).any(axis=(1, 2)), kind="stable")[: source.images].tolist())  # that show something
    pictures = first.features[chosen].movedim(1, -1).numpy()
    panels = {judged.title: judged.answers.reshape(shape)[chosen] for judged in source.judged}
    return drawings.areas(pictures, chosen, true[chosen], panels, [str(label) for label in source.classes])


def confusion(source: Drawn) -> figures.Section:
    """Draw the confusion of the classes that occur, as true or as predicted."""
    occurring = sorted({int(k) for judged in source.judged for k in (*judged.true, *judged.answers)})
    counts = []
    for judged in source.judged:
        count_CC = np.zeros((len(source.classes), len(source.classes)), dtype=np.int64)
        np.add.at(count_CC, (judged.true, judged.answers), 1)
        counts.append((judged.title, count_CC[np.ix_(occurring, occurring)]))
    return drawings.confusions(counts, [str(source.classes[k]) for k in occurring])


def classes(source: Drawn) -> figures.Section:
    """Draw the accuracy of each class."""
    present = sorted({int(k) for k in source.judged[0].true})
    shares = []
    for judged in source.judged:
        right = judged.true == judged.answers
        shares.append((judged.title, [(int(right[judged.true == k].sum()), int((judged.true == k).sum())) for k in present]))
    return drawings.by_class(shares, [str(source.classes[k]) for k in present])


def labels_of(source: Drawn) -> figures.Section:
    """Draw how often each of several labels is predicted right."""
    shares = []
    for judged in source.judged:
        right_NK = (judged.true > 0) == (judged.answers > 0)
        shares.append((judged.title, [(int(right_N.sum()), len(right_N)) for right_N in right_NK.T]))
    return drawings.by_class(shares, [str(name) for name in source.classes], "label")


def predicted(source: Drawn) -> figures.Section:
    """Draw predicted against true targets, in their units."""
    names = [str(name) for name in source.classes]
    models = []
    for judged in source.judged:
        scale = judged.model.info.targets
        std_K = np.ones(len(names)) if scale is None else np.array(scale.std)
        models.append(drawings.Predicted(judged.title, in_unit(judged.answers, scale), std_K))
    return drawings.predicted(source.judged[0].true, names, models)


PIXELS = "pixels"  # in the place of a task
OF_TASK: dict[str, dict[str, Callable[[Drawn], figures.Section]]] = {
    "classes": {"rollout": rollout, "confusion": confusion, "classes": classes},
    "multilabel": {"labels": labels_of},
    "regression": {"predicted": predicted},
    "survival": {},
    "custom": {},
    PIXELS: {"areas": areas},
}
PICTURES = {name: task for task, pictures in OF_TASK.items() for name in pictures}


def plot(
    folders: Sequence[Path],
    shard: Path,
    out: Path,
    images: int,
    wanted: Sequence[str],
    allow_models: Collection[str] = (),
    table: ReadOptions = PLAIN,
    held: Collection[str] = (),
    formats: Sequence[Format] = ("png",),
) -> list[str]:
    """Write pictures of these models and a page into `out`, and return a line for each.

    Without `wanted` all possible pictures are drawn, and lines say why others are not. `table` and `held` are those of
    `load_shard`, `formats` the forms of the pictures.

    Raises:
        NoModel: A folder has no model.
        SettingError: A wanted picture is not possible.
        AttuneError: As in load_shard and the preparation of its test part.
    """
    models = [Model.load(model_folder(folder), allow_models=allow_models) for folder in folders]
    loaded = load_shard(shard, options=models[0].info.options_for(shard, table), held=held)
    source = Drawn(loaded.name, models[0].info.classes, judge(models, loaded), images)
    task = PIXELS if models[0].info.model.labels_pixels else models[0].info.task
    if not OF_TASK[task]:
        raise SettingError(f"there are no pictures of models for {task}: `fedclient evaluate` has their score")
    for name in wanted:
        if PICTURES[name] != task:
            raise SettingError(f"the picture {name!r} is of models for {PICTURES[name]}, and this one is for {task}")
    sections, left_out = figures.drawn(OF_TASK[task], source, wanted)
    title = f"{', '.join(judged.title for judged in source.judged)} on {source.shard}"
    return [*map(str, figures.write(out, title, sections, formats)), *left_out]


def model_folder(folder: Path) -> Path:
    """Return the folder of a finished model: the folder itself, or that in a device's home."""
    return folder / "model" if (folder / "model" / "model.json").exists() else folder


def judge(models: Sequence[Model], shard: Shard) -> list[Judged]:
    """Return each model with the test part in the form that it takes.

    Raises:
        ShardError: There is no test part.
        ShapeMismatch, UndeclaredLabels: A model does not fit the shard.
        SettingError: The models do not fit each other.
    """
    if not len(shard.test_x):
        raise ShardError(f"shard {shard.path} has no test samples to draw")
    for model in models:
        check_labelled_alike(shard, model.info.model, model.info.task, model.info.classes)
    if any(model.info.classes != models[0].info.classes for model in models):
        raise SettingError("these models know different classes: compare models of federations with the same ones")
    judged = []
    for title, model in zip(titles([model.info for model in models]), models, strict=True):
        features = model.prepared(shard.test_x, f"shard {shard.name}", shard.column_names)
        judged.append(Judged(title, model, features, _true(shard, model)))
    return judged


def _true(shard: Shard, model: Model) -> Array:
    if model.info.task != "classes":
        return shard.test_y.astype(np.float64)
    return y_of(shard, model.info.model, "classes", model.info.classes, None)[1].reshape(-1)


def titles(infos: Sequence[Any]) -> list[str]:
    """Return a title for each model: its own; if that is not unique, with the kind of model and the device."""
    plain = [info.title for info in infos]
    count = Counter(plain)
    with_name = [title if count[title] == 1 else f"{title} ({info.name})" for title, info in zip(plain, infos, strict=True)]
    count = Counter(with_name)
    return [title if count[title] == 1 else f"{title} {i + 1}" for i, title in enumerate(with_name)]


def spread(true: Array, count: int) -> list[int]:
    """Return so many samples in the order of classes: the first of each class, then the second of each, and so on."""
    rank_N = np.zeros(len(true), dtype=np.int64)
    seen: Counter[int] = Counter()
    for i, k in enumerate(true.tolist()):
        rank_N[i] = seen[k]
        seen[k] += 1
    taken = np.lexsort((true, rank_N))[:count]
    return sorted(taken.tolist(), key=lambda i: (int(true[i]), int(rank_N[i])))
