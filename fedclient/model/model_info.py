"""Description of a finished model: what model.json holds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attune.common.config import TrainSettings
from attune.common.methods.registry import configured_on_device
from attune.common.metrics import NETWORKS, Choice
from attune.common.plan import Label, ModelSpec, Plan, Scale
from attune.common.privacy.accountant import MEANING, mode_of, visible_of
from attune.common.schema import Schema
from attune.common.task import TaskName
from attune.fedclient.data.table import may_be_table
from attune.fedclient.messages import OrderResult
from attune.fedclient.read_options import PLAIN, ReadOptions


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
