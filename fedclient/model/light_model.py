"""Finished models of any device: what needs no torch of them, and the closed form of a light device.

N samples, C classes, K numbers or labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.errors import NEEDS_TORCH, NoModel, SettingError, ShapeMismatch, ShardError, WireError
from attune.common.methods.ridge import BLOCK, WEIGHT
from attune.common.plan import Scale
from attune.common.protocol import HAS_TORCH
from attune.fedclient import light_blobs
from attune.fedclient.data import kinds
from attune.fedclient.data.prepare import check_columns, check_labelled_alike, prepare_features, y_of
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.standardiser import UNSEEN, Standardiser, with_nan
from attune.fedclient.model.model_info import ModelInfo, file_of, read_info, weights_of
from attune.fedclient.work.light import FixedFeatures, answers_of, mean_score, right_of


class FinishedModel(ABC):
    """Finished model, ready to predict. Samples are prepared as in the training.

    Args:
        info: Its description.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.standardiser = Standardiser.from_dict(info.standardiser) if info.standardiser else None

    @abstractmethod
    def answers_of(self, features: Any) -> npt.NDArray[Any]:
        """Return indices into `classes`, (N,), or (N, T) or (N, H, W) with a label per position; (N, K) for other tasks."""

    @abstractmethod
    def shares_of(self, features: Any) -> npt.NDArray[np.float32]:
        """Return the probabilities of classes or labels."""

    @property
    def unseen(self) -> list[str]:
        """The columns of which training on the device knew no value. They change no prediction."""
        schema = self.info.table_schema
        if self.standardiser is None or schema is None:
            return []
        pairs = zip(schema.features(), self.standardiser.std.tolist(), strict=True)
        return [feature.column for feature, std in pairs if feature.role == "number" and std == UNSEEN]

    def predict(self, x: npt.NDArray[Any], who: str = "the given data") -> list[Any]:
        """Return the original label of each sample of x (N, ...), or of each position of each sample if the model labels those.

        In regression it returns a number in the unit of y, or K of them; with several labels 0 or 1 for each; in survival the
        log hazard, up to a constant of this device.

        Raises:
            ShapeMismatch: x has another shape than the model takes.
            NonFiniteFeatures: x has NaN or infinite values.
        """
        answers, classes = self._at_own_size(self.answers_of(self.prepared(x, who)), x, who), self.info.classes
        if self.info.task == "regression":
            numbers = in_unit(answers, self.info.targets)
            return list((numbers[:, 0] if len(classes) == 1 else numbers).tolist())
        if self.info.task == "custom":
            return list(answers.tolist())
        if self.info.task == "multilabel":
            return list(answers.astype(np.int64).tolist())
        if self.info.task == "survival":
            return list(answers[:, 0].tolist())
        if self.info.model.per_position:
            return list(np.array(classes, dtype=object)[answers].tolist())
        return [classes[index] for index in answers.tolist()]

    def _at_own_size(self, answers: npt.NDArray[Any], x: npt.NDArray[Any], who: str) -> npt.NDArray[Any]:
        """Return what is said of pixels at the size of the images of which it is said."""
        if not self.info.model.labels_pixels or self.info.model.channels is msgspec.UNSET:
            return answers
        return kinds.nearest(answers, kinds.with_axes(x, self.info.model, who, self.info.channels or ()).shape[1:3])

    def prepared(self, x: npt.NDArray[Any], who: str = "the given data", names: Sequence[str] = ()) -> Any:
        """Return samples (N, ...) as the model takes them, prepared as in the training. Errors are those of `predict`.

        `names` are those of the channels of x; empty: as they were in the training on this device.
        """
        if self.info.table_schema is None:
            x = with_nan(x, self.info.model.kind, self.info.missing_words)
        return prepare_features(x, self.info.model, self.standardiser, who, names or self.info.channels or ())

    def evaluate(self, shard: Shard) -> tuple[float, int]:
        """Return (accuracy, samples) on the test part. With a label per token, the accuracy is over all positions.

        For pixels it is Dice, for other tasks R2, label accuracy or the C-index (common.task).

        Raises:
            UndeclaredLabels: The test part has unknown labels.
            ShardError: There is no test part, or it has no score.
            AttuneError: As in `predict`.
        """
        features, y = self.test_part(shard)
        return mean_score(right_of(self.info.task, self.answers_of(features), y)), len(y)

    def probabilities(self, x: npt.NDArray[Any], who: str = "the given data") -> npt.NDArray[np.float32]:
        """Return the probability of each class, (N, C) or (N, ..., C) by position, or of each label, (N, K).

        Raises:
            SettingError: The model predicts neither classes nor labels.
            AttuneError: As in `predict`.
        """
        if self.info.task not in ("classes", "multilabel"):
            more = ": --intervals SHARD gives each number an interval" if self.info.task == "regression" else ""
            raise SettingError(f"a model of {self.info.task} has no probabilities{more}")
        return self._at_own_size(self.shares_of(self.prepared(x, who)), x, who)

    def test_part(self, shard: Shard) -> tuple[Any, npt.NDArray[Any]]:
        """Return the features of the test part, prepared, and its y. Errors are those of `right`."""
        if shard.kind != self.info.model.kind:
            raise ShapeMismatch(f"shard {shard.name} holds {shard.kind}, but the model takes {self.info.model.kind}")
        check_labelled_alike(shard, self.info.model, self.info.task, self.info.classes)
        check_columns(shard, () if self.info.model.channels else self.info.column_names)
        if not len(shard.test_x):
            raise ShardError(f"shard {shard.path} has no test samples to evaluate on: give a shard that has")
        features = self.prepared(shard.test_x, f"shard {shard.name}", shard.column_names)
        _, y = y_of(shard, self.info.model, self.info.task, self.info.classes, self.info.targets)
        return features, y


class LightModel(FinishedModel):
    """Closed form, by NumPy alone.

    Args:
        info: Its description.
        tensors: The state of common.models.closed_form.ClosedForm.
    """

    def __init__(self, info: ModelInfo, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        super().__init__(info)
        self._features = FixedFeatures(info.model)
        self._place = self._features.places[int(tensors[BLOCK])]
        self._W_CD = (self._features.options.sharpness or 1.0) * tensors[WEIGHT][:, self._place]

    @classmethod
    def load(cls, folder: Path) -> LightModel:
        """Load the model in a folder.

        Raises:
            NoModel: `folder` holds none, or a damaged one.
            SettingError: It is another model than a closed form.
        """
        info = read_info(folder)
        if info.model.name != "closed-form" or list(weights_of(info)) != [info.main] or info.model.kind != "tabular":
            raise SettingError(f"the model in {folder} is no closed form of a table alone, so it needs torch: {NEEDS_TORCH}")
        path = folder / file_of(info.main, info)
        try:
            return cls(info, light_blobs.read_tensors(path, info.files.get(path.name)))
        except (OSError, WireError, IndexError, KeyError, ValueError) as error:
            raise NoModel(f"the model in {folder} is damaged ({error}): start fedclient again to fetch it") from error

    def answers_of(self, features: Any) -> npt.NDArray[Any]:
        return np.asarray(answers_of(self.info.task, self._scores(features)))

    def shares_of(self, features: Any) -> npt.NDArray[np.float32]:
        scores_NC = self._scores(features)
        if self.info.task == "multilabel":
            return np.asarray(1 / (1 + np.exp(-scores_NC)), dtype=np.float32)
        shares_NC = np.exp(scores_NC - scores_NC.max(axis=1, keepdims=True))
        return np.asarray(shares_NC / shares_NC.sum(axis=1, keepdims=True), dtype=np.float32)

    def _scores(self, features: Any) -> npt.NDArray[np.float64]:
        return np.asarray(self._features.of(features)[:, self._place] @ self._W_CD.T)


def load_model(folder: Path, allow_models: Collection[str] = ()) -> FinishedModel:
    """Load the model in a folder as Model.load does; without torch a closed form alone, as LightModel.load."""
    if not HAS_TORCH:
        return LightModel.load(folder)
    from attune.fedclient.model.artifact import Model

    return Model.load(folder, allow_models=allow_models)


def in_unit(numbers: npt.NDArray[Any], scale: Scale | None) -> npt.NDArray[np.float64]:
    """Return predicted numbers (N, K) in the unit of y."""
    mean, std = (np.array(scale.mean), np.array(scale.std)) if scale is not None else (0.0, 1.0)
    return np.asarray(numbers.astype(np.float64) * std + mean)
