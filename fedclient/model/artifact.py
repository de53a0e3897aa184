"""The finished model: files that need neither server nor federation to predict.

model/model.safetensors holds the tensors; model/model.json what they are, how features are prepared and what classes mean. Of
a blend, model.safetensors is the network with the largest weight, and each of the other models has a file of its name.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attune.common.durable import PUBLIC, committed_folder, read_small, write_file
from attune.common.errors import NoModel, SettingError, ShapeMismatch, ShardError, WireError
from attune.common.hardware import choose
from attune.common.methods.registry import configured_from
from attune.common.methods.settings.objectives import ModelSettings
from attune.common.metrics import NETWORKS
from attune.common.models.registry import build, size_bytes
from attune.common.models.structure import tensors_of
from attune.common.plan import Scale
from attune.common.plugins import check_installed, check_model_allowed
from attune.common.text import from_json, newer_format
from attune.common.wire.files import read_tensors, write_tensors
from attune.fedclient.data.prepare import check_columns, check_labelled_alike, prepare_features, y_of
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.standardiser import UNSEEN, Standardiser, with_nan
from attune.fedclient.model.model_info import FORMAT, ModelInfo, guarantee_of
from attune.fedclient.work.blend import Member, answers_of, blended_shares
from attune.fedclient.work.build import objective_for, predictor_for
from attune.fedclient.work.executor import AnyLearner
from attune.fedclient.work.measures import mean_score
from attune.fedclient.work.objectives.base import Network, Tensors
from attune.fedclient.work.portfolio.evaluators import ROWS
from attune.fedclient.work.portfolio.portfolio import reader_of, trainer_of
from attune.fedclient.work.predictors.base import FEATURES, PlainPredictor
from attune.fedclient.work.task_measures import measure_for
from attune.fedclient.work.trainer import EVALUATION_BATCH, Trainer

HOLD_SAMPLES = frozenset({ROWS, FEATURES})  # tensors that are training samples, or made of single ones
MOST_BYTES = 64 << 20  # of model.json: classes and columns may be many
SMALL_BYTES = 64 << 20  # of a model: what a description may declare beyond its files


def save(
    folder: Path,
    info: ModelInfo,
    tensors: Mapping[str, Mapping[str, Tensor]],
    finish: Callable[[Path], object] = lambda fresh: None,
) -> Path:
    """Write all files beside `folder`, then replace it, and return it. `finish` gets the fresh folder before it counts.

    Raises:
        DiskFull: The disk has no room.
    """
    old = folder.with_name(f"{folder.name}.old")
    with committed_folder(folder) as fresh:
        files = {}
        for name, values in tensors.items():
            blob = write_tensors(fresh / _file_of(name, info), values)
            files[blob.name] = blob.digest
        info = msgspec.structs.replace(info, files=files)
        write_file(fresh / "model.json", msgspec.json.format(msgspec.json.encode(info)), PUBLIC, durable=False)
        finish(fresh)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _file_of(name: str, info: ModelInfo) -> str:
    return f"{'model' if name == info.main else name}.safetensors"


def _weights_of(info: ModelInfo) -> dict[str, float]:
    return info.weights or {info.kept: 1.0}


def _tensors_in(path: Path, info: ModelInfo) -> Tensors:
    """Read the tensors of a finished model.

    Raises:
        NoModel: The file is missing or damaged.
    """
    try:
        # Homes of older versions have no digests.
        return read_tensors(path, digest=info.files.get(path.name))
    except (OSError, WireError) as error:
        raise NoModel(f"{error}: start fedclient again to fetch the model") from None


def finished_model(learner: AnyLearner) -> tuple[ModelInfo, dict[str, Tensors]]:
    """Return what the device predicts with now, in the form that `save` takes.

    Raises:
        NoModel: There was no order yet.
    """
    plan, result, tensors = learner.plan, learner.newest, learner.finished()
    assert result is not None  # noqa: S101 (there is a finished model)
    standardiser = learner.standardiser
    info = ModelInfo(
        name=learner.name,
        federation=plan.federation,
        method=plan.method,
        method_options=plan.method_options,
        model=plan.model,
        classes=plan.classes,
        train=plan.train,
        standardiser=standardiser.to_dict() if standardiser else None,
        column_names=plan.column_names,
        kept=result.choice,
        own_choice=result.own_choice,
        weights=dict(result.weights),
        sharpness=dict(result.sharpness),
        accuracy=result.accuracy,
        threshold=msgspec.UNSET if result.threshold is None else result.threshold,
        accuracies={name: value for name, value in result.accuracies.items() if value is not None},
        samples=result.samples,
        test_samples=result.test_samples or 0,
        round=result.round,
        task=plan.task,
        targets=learner.targets,
        seed=plan.seed,
        plugins=plan.plugins or msgspec.UNSET,
        schema=plan.schema or msgspec.UNSET,
        privacy=guarantee_of(plan, result, tensors),
        contains_samples=sorted(name for name, of in tensors.items() if HOLD_SAMPLES & of.keys()),
        format=1 if all(name in NETWORKS for name in tensors) else FORMAT,
    )
    return info, tensors


def read_info(folder: Path) -> ModelInfo:
    """Read the description of a finished model.

    Raises:
        NoModel: There is none, it is damaged, or a newer version wrote it.
    """
    try:
        text = read_small(folder / "model.json", MOST_BYTES)
        if newer := newer_format(text, folder / "model.json", "fedclient", FORMAT):
            raise NoModel(newer)
        return from_json(text, ModelInfo)
    except (OSError, msgspec.DecodeError) as error:
        raise NoModel(f"there is no finished model in {folder} ({error})") from None


def _check_size(info: ModelInfo, folder: Path) -> None:
    """Check that the files can hold the model before memory is taken for it. Frozen bodies of user code are not in the files.

    Holes of a file hold nothing, so the blocks of the disk count. The factor allows for disks that compress.

    Raises:
        NoModel: The description is of a larger model, or a file is missing.
    """
    try:
        facts = [(folder / _file_of(name, info)).stat() for name in _weights_of(info)]
    except OSError as error:
        raise NoModel(f"{error}: start fedclient again to fetch the model") from None
    stored = sum(min(file.st_size, 512 * getattr(file, "st_blocks", file.st_size)) for file in facts)
    declared = max(sum(file.st_size for file in facts), 0 if ":" in info.model.name else size_bytes(info.model))
    if declared > 4 * stored + SMALL_BYTES:
        raise NoModel(f"the model in {folder} has {declared:,} bytes by its description, and its files hold {stored:,}")


class Model:
    """Finished model, ready to predict.

    Args:
        info: Its description.
        tensors: The tensors of each of its models, as `save` took them.

    Raises:
        SettingError: It cannot be built here.
    """

    def __init__(self, info: ModelInfo, tensors: Mapping[str, Mapping[str, Tensor]], device: str = "cpu") -> None:
        self.info = info
        check_installed(info.plugins or {})
        configured = configured_from({**info.method_options, "name": info.method}, returns={})
        self.standardiser = Standardiser.from_dict(info.standardiser) if info.standardiser else None
        self.measure = measure_for(info.model, "dice" if info.model.labels_pixels else info.task)
        network, where = build(info.model, info.seed), choose(device)
        read = reader_of(Network(network.to(where)), tensors_of(network))  # nothing changes the network's own tensors

        def member(name: str, weight: float) -> Member:
            if name not in NETWORKS:
                outputs = info.model.classes
                trainer = trainer_of(name, dict(tensors[name]), info.task, outputs, where, read)
                return Member(weight, trainer, dict(tensors[name]), info.sharpness.get(name, 1.0))
            predictor = predictor_for(configured) if name == info.own_choice else PlainPredictor(ModelSettings())
            trainer = Trainer(network, objective_for(configured), predictor, info.train, where, measure=self.measure)
            return Member(weight, trainer, dict(tensors[name]), info.sharpness.get(name, 1.0))

        self.members = {name: member(name, weight) for name, weight in _weights_of(info).items()}
        # The network of pictures and exports.
        self.trainer, self.tensors = self.members[info.main].trainer, self.members[info.main].tensors

    @classmethod
    def load(cls, folder: Path, device: str = "cpu", allow_models: Collection[str] = ()) -> Model:
        """Load the model in a folder.

        Args:
            folder: Folder of a finished model.
            device: Torch device that computes.
            allow_models: Model code (`module:factory`) that may run here. A folder cannot allow its own.

        Raises:
            NoModel: `folder` holds none, or a damaged one: it cannot predict one sample.
            SettingError: The model is code that is not in `allow_models`, or cannot be built here.
        """
        info = read_info(folder)
        check_model_allowed(info.model.name, allow_models, f"the model in {folder}")
        _check_size(info, folder)
        try:
            model = cls(info, {name: _tensors_in(folder / _file_of(name, info), info) for name in _weights_of(info)}, device)
            if ":" not in info.model.name:
                answers_of(list(model.members.values()), model.prepared(np.zeros((1, *info.model.shape), np.int64)))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise NoModel(f"the tensors of the model in {folder} do not fit its description ({error})") from error
        return model

    def without_samples(self) -> Model:
        """Return the model without fitted models that hold training samples; the weights of the others sum to 1 again.

        Raises:
            NoModel: It has no others.
        """
        held = {name for name, member in self.members.items() if ROWS in member.tensors}
        left = {name: member for name, member in self.members.items() if name not in held}
        if not left:
            raise NoModel(f"the model of {self.info.name} is made of its training samples alone: export it --with-samples")
        total = sum(member.weight for member in left.values())
        weights = {name: member.weight / total for name, member in left.items()}
        info = msgspec.structs.replace(
            self.info,
            weights=weights,
            kept=self.info.kept if self.info.kept in left else self.info.main,
            contains_samples=[name for name in self.info.contains_samples if name not in held],
        )
        return Model(info, {name: member.tensors for name, member in left.items()}, str(self.trainer.device))

    def __repr__(self) -> str:
        return f"<Model of {self.info.name}, {self.info.method}, accuracy {self.info.accuracy}>"

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
        answers, classes = self.answers_of(self.prepared(x, who)), self.info.classes
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

    def prepared(self, x: npt.NDArray[Any], who: str = "the given data") -> Tensor:
        """Return samples (N, ...) as the model takes them, prepared as in the training. Errors are those of `predict`."""
        if self.info.table_schema is None:
            x = with_nan(x, self.info.model.kind, self.info.missing_words)
        return prepare_features(x, self.info.model, self.standardiser, who)

    def evaluate(self, shard: Shard) -> tuple[float, int]:
        """Return (accuracy, samples) on the test part. With a label per token, the accuracy is over all positions.

        For pixels it is Dice, for other tasks R2, label accuracy or the C-index (common.task). Errors are those of `right`.
        """
        return mean_score(self.right(shard)), len(shard.test_x)

    def right(self, shard: Shard) -> Tensor:
        """Return which labels of the test part it predicts, (N,) or (N, T) bool; in other tasks scores (N,), or a C-index (1,).

        Raises:
            UndeclaredLabels: The test part has unknown labels.
            ShardError: There is no test part, or it has no score.
            AttuneError: As in `predict`.
        """
        features, y = self.test_part(shard)
        return self.measure.right(torch.from_numpy(self.answers_of(features)), torch.from_numpy(y))

    def probabilities(self, x: npt.NDArray[Any], who: str = "the given data") -> npt.NDArray[np.float32]:
        """Return the probability of each class, (N, C) or (N, ..., C) by position, or of each label, (N, K).

        Raises:
            SettingError: The model predicts neither classes nor labels.
            AttuneError: As in `predict`.
        """
        if self.info.task not in ("classes", "multilabel"):
            more = ": --intervals SHARD gives each number an interval" if self.info.task == "regression" else ""
            raise SettingError(f"a model of {self.info.task} has no probabilities{more}")
        features, members = self.prepared(x, who), list(self.members.values())
        torch.set_num_threads(1)
        return np.concatenate([blended_shares(members, some).cpu().numpy() for some in features.split(EVALUATION_BATCH)])

    def test_part(self, shard: Shard) -> tuple[Tensor, npt.NDArray[Any]]:
        """Return the features of the test part, prepared, and its y. Errors are those of `right`."""
        if shard.kind != self.info.model.kind:
            raise ShapeMismatch(f"shard {shard.name} holds {shard.kind}, but the model takes {self.info.model.kind}")
        check_labelled_alike(shard, self.info.model, self.info.task, self.info.classes)
        check_columns(shard, self.info.column_names)
        if not len(shard.test_x):
            raise ShardError(f"shard {shard.path} has no test samples to evaluate on: give a shard that has")
        features = self.prepared(shard.test_x, f"shard {shard.name}")
        _, y = y_of(shard, self.info.task, self.info.classes, self.info.targets)
        if not self.measure.can_score(torch.from_numpy(y)):
            raise ShardError(
                f"the test samples of shard {shard.path} have no C-index: none had its event before the time of another one"
            )
        return features, y

    def answers_of(self, features: Tensor) -> npt.NDArray[Any]:
        """Return indices into `classes`, (N,), or (N, T) with a label per position; (N, K) for other tasks."""
        torch.set_num_threads(1)
        return np.asarray(answers_of(list(self.members.values()), features))


def in_unit(numbers: npt.NDArray[Any], scale: Scale | None) -> npt.NDArray[np.float64]:
    """Return predicted numbers (N, K) in the unit of y."""
    mean, std = (np.array(scale.mean), np.array(scale.std)) if scale is not None else (0.0, 1.0)
    return np.asarray(numbers.astype(np.float64) * std + mean)
