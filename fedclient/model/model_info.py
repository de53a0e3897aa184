"""Description of a finished model: what model.json holds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attune.common.config import TrainSettings
from attune.common.durable import PUBLIC, committed_folder, read_small, write_file
from attune.common.errors import NoModel
from attune.common.methods.registry import configured_on_device
from attune.common.metrics import NETWORKS, Choice
from attune.common.plan import Label, ModelSpec, Plan, Scale
from attune.common.privacy.accountant import MEANING, mode_of, visible_of
from attune.common.protocol import HAS_TORCH
from attune.common.schema import Schema
from attune.common.task import TaskName
from attune.common.text import from_json, newer_format
from attune.fedclient.data.table import may_be_table
from attune.fedclient.messages import OrderResult
from attune.fedclient.read_options import PLAIN, ReadOptions
from attune.fedclient.work.executor import AnyLearner
from attune.fedclient.work.orders import FEATURES, ROWS, Tensors

if TYPE_CHECKING or HAS_TORCH:
    from attune.common.wire.files import write_tensors
else:
    from attune.fedclient.light_blobs import write_tensors
if TYPE_CHECKING:
    from torch import Tensor


class PrivacyGuarantee(msgspec.Struct, frozen=True):
    """Privacy of a finished model's run: its guarantee by noise, and what could be seen (docs/privacy.md).

    Attributes:
        unit: "example", "group" or "client"; "none" under secure aggregation alone.
        epsilon: Epsilon that was spent on the device's data in all runs; with unit "client" the budget of the run. None if it
            is not known.
        delta: Chance that the guarantee fails.
        finished: Models that were trained without noise, or on this device's data with none: nothing is guaranteed of them.
        mode: Place where the noise is added, and secure aggregation.
        adjacency: Meaning of the two data sets that nobody can tell apart.
        planned: Epsilon of the run's budget. None if it has none.
        visible: Who sees what of the devices.
    """

    unit: str
    epsilon: float | None
    delta: float
    finished: list[str]
    mode: str = ""
    adjacency: str = ""
    planned: float | None = None
    visible: str = ""


def guarantee_of(plan: Plan, result: OrderResult, models: Collection[str]) -> PrivacyGuarantee | msgspec.UnsetType:
    """Return the guarantee of a device's models; unset where the plan has none.

    Args:
        plan: The plan.
        result: Result of the device's last order.
        models: The models that the device keeps.
    """
    privacy = plan.privacy
    if privacy is None or not mode_of(privacy):
        return msgspec.UNSET
    by_server = privacy.on_server  # what a device trains on after it is served has none of that noise
    has_noise = (
        {"common"} if by_server else {"common", "personalized"} - ({result.own_choice} if not _own_has_noise(plan) else set())
    )
    without_noise = sorted(set(models) - has_noise)
    return PrivacyGuarantee(
        privacy.unit,
        privacy.epsilon if by_server else result.epsilon,
        privacy.delta,
        sorted(models) if privacy.unit == "none" else without_noise,
        mode_of(privacy),
        "" if privacy.unit == "none" else MEANING["zero-out"].format(unit="device" if by_server else privacy.unit),
        privacy.epsilon,
        visible_of(privacy),
    )


def _own_has_noise(plan: Plan) -> bool:
    """Return whether what the method leads to on a device follows from its samples through noise alone."""
    configured = configured_on_device(plan)
    stays = configured.objective.own_stays and configured.predictor.own_model
    return not (stays or configured.predictor.reads_samples or configured.dial)


HOLD_SAMPLES = frozenset({ROWS, FEATURES})
MOST_BYTES = 64 << 20  # of model.json: classes and columns may be many
FORMAT = 2  # of a model with fitted ones; earlier versions read format 1, which has none


class ModelInfo(msgspec.Struct, frozen=True):
    """model.json."""

    name: str  # of the device
    federation: str
    method: str
    method_options: dict[str, Any]
    model: ModelSpec  # a frozen body is not saved: building the model reads it and checks its digest
    classes: list[Label]  # class index -> original label; names of K targets or labels
    train: TrainSettings
    standardiser: dict[str, list[float | str]] | None = None
    column_names: list[str] = []  # in the order in which the model takes them; empty: not known
    kept: Choice = "personalized"  # which of the device's models this is, or counts most; "alone": the fitted ones together
    own_choice: Choice = msgspec.field(name="own", default="personalized")  # which of them predicts as the method does
    weights: dict[str, float] = {}  # of a blend; a model alone has none
    sharpness: dict[str, float] = {}  # of each of its models: scores are multiplied by it; 1 where it is not named
    accuracy: float | None = None  # what is predicted with, on the device's test part
    threshold: float | msgspec.UnsetType = msgspec.UNSET  # of the second of two classes, chosen on held-out samples
    accuracies: dict[Choice, float] = {}  # of each model that was compared, on the same
    samples: int = 0
    test_samples: int = 0
    round: int = 0
    task: TaskName = "classes"
    targets: Scale | None = None  # of predicted numbers: their mean and standard deviation, by which the model scales them
    seed: int = 0  # that the model is built with
    privacy: PrivacyGuarantee | msgspec.UnsetType = msgspec.UNSET  # of training with noise; left out without it
    files: dict[str, str] = {}  # file beside this one -> digest
    plugins: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # the plan's, left out where it has none
    format: int = 1
    schema: Schema | msgspec.UnsetType = msgspec.UNSET  # by which tables are read; left out where there is none
    channels: list[str] | msgspec.UnsetType = msgspec.UNSET  # names on the device where they may differ from the model's
    contains_samples: list[str] = []  # models that hold training samples, or features of them; who gets this folder gets them

    @property
    def main(self) -> str:
        """The model of model.safetensors, of which pictures are drawn: the network with the largest weight, if there is any."""
        networks = {name: weight for name, weight in self.weights.items() if name in NETWORKS} or self.weights
        return self.kept if self.kept in networks or not networks else max(networks, key=lambda name: networks[name])

    @property
    def missing_words(self) -> tuple[str, ...]:
        """Words that mean a missing value, as in the training; empty for the usual ones."""
        return tuple(map(str, (self.standardiser or {}).get("missing_words", ())))

    @property
    def table_schema(self) -> Schema | None:
        """The schema by which tables are read, if there is one."""
        return self.schema if isinstance(self.schema, Schema) else None

    def options_for(self, path: Path, given: ReadOptions = PLAIN) -> ReadOptions:
        """Return the options to read data for this model.

        Of a table they have the model's columns, task, targets and words for missing values, unless the user has given them.
        Missing values stay, for the model to fill them in.
        """
        options = given.keeping_gaps
        if not (path.is_file() and may_be_table(path)):
            return options
        words = given.missing_words or self.missing_words
        schema = self.table_schema
        columns = given.columns or (tuple(self.column_names) if schema is None else ())
        options = replace(options, columns=columns, missing_words=words, schema=schema, proposes=False)
        if self.task == "classes" or given.task != "classes":
            return options
        return replace(options, task=self.task, label=given.label or ",".join(str(name) for name in self.classes))

    @property
    def title(self) -> str:
        """The method, and which of the device's models this is unless it is the method's own."""
        if self.weights:
            return f"{self.method}, blend"
        return self.method if self.kept == self.own_choice else f"{self.method}, {self.kept} model"


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


def finished_model(learner: AnyLearner, channels: Sequence[str] = ()) -> tuple[ModelInfo, dict[str, Tensors]]:
    """Return what the device predicts with now, in the form that `save` takes. `channels` are the names of its channels.

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
        channels=list(channels) if channels and plan.model.channels else msgspec.UNSET,
        contains_samples=sorted(name for name, of in tensors.items() if HOLD_SAMPLES & of.keys()),
        format=1 if all(name in NETWORKS for name in tensors) else FORMAT,
    )
    return info, tensors


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
            blob = write_tensors(fresh / file_of(name, info), values)
            files[blob.name] = blob.digest
        info = msgspec.structs.replace(info, files=files)
        write_file(fresh / "model.json", msgspec.json.format(msgspec.json.encode(info)), PUBLIC, durable=False)
        finish(fresh)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def file_of(name: str, info: ModelInfo) -> str:
    """Return the name of the file of one of its models."""
    return f"{'model' if name == info.main else name}.safetensors"


def weights_of(info: ModelInfo) -> dict[str, float]:
    """Return the weight of each of its models."""
    return info.weights or {info.kept: 1.0}
