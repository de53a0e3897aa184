"""`fedclient plot`: what finished models answer on a shard's test part, offline, as pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attune.common.errors import SettingError, ShardError
from attune.common.pictures import page
from attune.common.plan import Label
from attune.common.task import TaskName
from attune.fedclient.data import labels
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.prepare import check_labelled_alike, prepare_features
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.model import drawings
from attune.fedclient.model.artifact import Model, in_unit
from attune.fedclient.model.rollout import over_patches


@dataclass(frozen=True)
class Judged:
    """One model on the test part of N samples. Answers are positions of labels in `classes`, (N,); of other tasks (N, K)."""

    title: str
    model: Model
    features: Tensor  # (N, ...), as the model takes them
    true: Array

    @cached_property
    def found(self) -> Array:
        answers = self.model.answers_of(self.features)
        return answers.reshape(-1) if self.model.info.task == "classes" else answers

    def maps(self, chosen: Sequence[int]) -> npt.NDArray[np.float64]:
        """The rollout over these samples: (len(chosen), h, w). Of a blend, that of what counts most. Errors: SettingError."""
        if self.model.info.model.kind != "images":
            raise SettingError(f"a rollout is over images, and this model takes {self.model.info.model.kind}")
        network = self.model.trainer.network
        x = self.features[list(chosen)].to(self.model.trainer.device)
        network.model.eval()
        with torch.no_grad():
            found = over_patches(network.model, x.shape[-2], x.shape[-1], lambda: network(self.model.tensors, x))
        return np.asarray(found)


@dataclass(frozen=True)
class Drawn:
    """What pictures are made of; all models have the same classes."""

    shard: str
    classes: list[Label]
    judged: list[Judged]
    images: int


def rollout(source: Drawn) -> page.Section:
    first = source.judged[0]
    chosen = spread(first.true, source.images)
    maps = [judged.maps(chosen) for judged in source.judged]
    pictures = first.features[chosen].movedim(1, -1).numpy()
    names = [str(label) for label in source.classes]
    looks = [
        drawings.RolloutPanel(judged.title, map_, [names[k] for k in judged.found[chosen]])
        for judged, map_ in zip(source.judged, maps, strict=True)
    ]
    return drawings.rollouts(pictures, chosen, [names[k] for k in first.true[chosen]], looks)


def confusion(source: Drawn) -> page.Section:
    """Of the classes that occur, as true or as found."""
    occurring = sorted({int(k) for judged in source.judged for k in (*judged.true, *judged.found)})
    counts = []
    for judged in source.judged:
        count_CC = np.zeros((len(source.classes), len(source.classes)), dtype=np.int64)
        np.add.at(count_CC, (judged.true, judged.found), 1)
        counts.append((judged.title, count_CC[np.ix_(occurring, occurring)]))
    return drawings.confusions(counts, [str(source.classes[k]) for k in occurring])


def classes(source: Drawn) -> page.Section:
    present = sorted({int(k) for k in source.judged[0].true})
    shares = []
    for judged in source.judged:
        right = judged.true == judged.found
        shares.append((judged.title, [(int(right[judged.true == k].sum()), int((judged.true == k).sum())) for k in present]))
    return drawings.by_class(shares, [str(source.classes[k]) for k in present])


def labels_of(source: Drawn) -> page.Section:
    """Of each of several labels how often it is answered right."""
    shares = []
    for judged in source.judged:
        right_NK = (judged.true > 0) == (judged.found > 0)
        shares.append((judged.title, [(int(right_N.sum()), len(right_N)) for right_N in right_NK.T]))
    return drawings.by_class(shares, [str(name) for name in source.classes], "label")


def predicted(source: Drawn) -> page.Section:
    """Of the targets, in their own units."""
    names = [str(name) for name in source.classes]
    models = []
    for judged in source.judged:
        scale = judged.model.info.targets
        std_K = np.ones(len(names)) if scale is None else np.array(scale.std)
        models.append(drawings.Predicted(judged.title, in_unit(judged.found, scale), std_K))
    return drawings.predicted(source.judged[0].true, names, models)


OF_TASK: dict[TaskName, dict[str, Callable[[Drawn], page.Section]]] = {
    "classes": {"rollout": rollout, "confusion": confusion, "classes": classes},
    "multilabel": {"labels": labels_of},
    "regression": {"predicted": predicted},
}
PICTURES = {name: task for task, pictures in OF_TASK.items() for name in pictures}


def plot(folders: Sequence[Path], shard: Path, out: Path, images: int, wanted: Sequence[str]) -> list[str]:
    """Pictures of these models and a page into `out`; a line for each.

    Without `wanted`: all pictures that are possible, and why others are not.
    Errors: NoModel, those of load_shard and of preparing its test part, and SettingError for a wanted picture that cannot be.
    """
    models, loaded = [Model.load(model_folder(folder)) for folder in folders], load_shard(shard)
    source = Drawn(loaded.name, models[0].info.classes, judge(models, loaded), images)
    task = models[0].info.task
    for name in wanted:
        if PICTURES[name] != task:
            raise SettingError(f"the picture {name!r} is of models for {PICTURES[name]}, and this one is for {task}")
    sections, left_out = page.drawn(OF_TASK[task], source, wanted)
    title = f"{', '.join(judged.title for judged in source.judged)} on {source.shard}"
    return [*map(str, page.write(out, title, sections)), *left_out]


def model_folder(folder: Path) -> Path:
    """A finished model's folder, or a device's home that holds one."""
    return folder / "model" if (folder / "model" / "model.json").exists() else folder


def judge(models: Sequence[Model], shard: Shard) -> list[Judged]:
    """Each model with the test part as it takes it.

    Errors: ShardError without a test part, ShapeMismatch and UndeclaredLabels where a model does not fit it, SettingError
    where models do not fit each other.
    """
    if not len(shard.test_x):
        raise ShardError(f"shard {shard.path} has no test samples to draw")
    for model in models:
        check_labelled_alike(shard, model.info.model, model.info.task, model.info.classes)
    if any(model.info.classes != models[0].info.classes for model in models):
        raise SettingError("these models know different classes: compare models of federations with the same ones")
    found = []
    for title, model in zip(titles([model.info for model in models]), models, strict=True):
        features = prepare_features(shard.test_x, model.info.model, model.standardiser, f"shard {shard.name}")
        found.append(Judged(title, model, features, _true(shard, model)))
    return found


def _true(shard: Shard, model: Model) -> Array:
    if model.info.task != "classes":
        return shard.test_y.astype(np.float64)
    return labels.to_indices(shard.test_y, model.info.classes, f"the test part of shard {shard.name}").reshape(-1)


def titles(infos: Sequence[Any]) -> list[str]:
    """A title for each model: its own, and if that is not enough, which of the device's models it is, and the device."""
    plain = [info.title for info in infos]
    count = Counter(plain)
    with_name = [title if count[title] == 1 else f"{title} ({info.name})" for title, info in zip(plain, infos, strict=True)]
    count = Counter(with_name)
    return [title if count[title] == 1 else f"{title} {i + 1}" for i, title in enumerate(with_name)]


def spread(true: Array, count: int) -> list[int]:
    """So many samples, the first of each class, then the second of each, and so on; in the order of classes."""
    rank_N = np.zeros(len(true), dtype=np.int64)
    seen: Counter[int] = Counter()
    for i, k in enumerate(true.tolist()):
        rank_N[i] = seen[k]
        seen[k] += 1
    taken = np.lexsort((true, rank_N))[:count]
    return sorted(taken.tolist(), key=lambda i: (int(true[i]), int(rank_N[i])))
