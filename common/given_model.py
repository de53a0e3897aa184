"""A network that devices evaluate without training (`fedserver evaluate`): what model.json says of it, and its plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attune.common.config import TrainSettings
from attune.common.durable import read_small
from attune.common.errors import NoModel, SettingError, ShapeMismatch, WireError
from attune.common.methods.registry import configured_from
from attune.common.methods.settings.objectives import ModelSettings
from attune.common.metrics import MOST_OTHERS, NETWORKS, Choice
from attune.common.plan import Label, ModelSpec, Plan, Scale
from attune.common.schema import Schema
from attune.common.task import TaskName
from attune.common.text import from_json

if TYPE_CHECKING:
    from attune.common.wire.tensors import Tensors

MOST_BYTES = 4 << 20  # of model.json: a plan takes no longer one
NEWEST = 2  # format of model.json that this version reads
# The method by which devices hand in the networks that they have.
HANDED_IN = {"name": "custom", "parts": {"*": "attended"}, "aggregators": {"attended": "handed-in"}, "evaluate": "trained"}


class GivenModel(msgspec.Struct, frozen=True):
    """Fields of model.json that an evaluation needs, and where its tensors are.

    Attributes:
        network: The network with the largest weight: a blend's other models hold training samples, and stay where they are.
        by_site: Each site standardises by its own statistics, as in the run that has made the model.
    """

    model: ModelSpec
    classes: list[Label]
    method: str = "fedavg"
    method_options: dict[str, Any] = {}
    train: TrainSettings = TrainSettings()
    standardiser: Scale | None = None
    column_names: list[str] = []
    kept: str = "personalized"
    own_choice: str = msgspec.field(name="own", default="personalized")
    weights: dict[str, float] = {}
    task: TaskName = "classes"
    targets: Scale | None = None
    seed: int = 0
    files: dict[str, str] = {}
    format: int = 1
    schema: Schema | msgspec.UnsetType = msgspec.UNSET
    by_site: bool = False
    size: int = 0

    @classmethod
    def of_plan(cls, plan: Plan, kept: Choice) -> GivenModel:
        """Return the description of a run's model of one kind."""
        return cls(
            plan.model, plan.classes, plan.method, plan.method_options, plan.train, plan.scale, plan.column_names, kept,
            task=plan.task, targets=plan.targets, seed=plan.seed, schema=plan.schema or msgspec.UNSET,
            by_site=plan.scale is None,
        )  # fmt: skip

    @property
    def network(self) -> str:
        """Name of the network; empty: there is none."""
        weights = self.weights or {self.kept: 1.0}
        networks = {name: weight for name, weight in weights.items() if name in NETWORKS}
        if self.kept in networks or not networks:
            return self.kept if self.kept in networks else ""
        return max(networks, key=lambda name: networks[name])

    @property
    def left_out(self) -> str:
        """Other models with which the folder predicts, in words; empty: none."""
        return ", ".join(sorted(self.weights.keys() - {self.network}))

    @property
    def scale(self) -> Scale | None:
        """The scale of features at every site; None: each site's own, or features that have none."""
        if self.standardiser is not None or self.by_site or self.model.kind not in ("series", "tabular"):
            return self.standardiser
        return Scale([0.0] * self.model.shape[-1], [1.0] * self.model.shape[-1])

    def check(self) -> None:
        """Check that a network can be evaluated for what it is.

        Raises:
            SettingError: It cannot, or a newer version has described it.
        """
        if self.format > NEWEST:
            raise SettingError("a newer version of attune has written this model: update attune here")
        if not self.network:
            raise SettingError(
                "the folder has models of scikit-learn alone, which hold training samples: they stay where they are"
            )
        predictor = configured_from({**self.method_options, "name": self.method}, returns={}).predictor
        if self.model.name == "closed-form" or (self.network == self.own_choice and not isinstance(predictor, ModelSettings)):
            raise SettingError(f"a model of {self.method} predicts by its own samples, so other sites cannot evaluate it")

    def settings(self, digest: str, matrix: bool = False) -> dict[str, Any]:
        """Return the settings of a run that evaluates it, by section; `matrix`: or in its place the networks of sites."""
        spec = self.model
        columns = msgspec.to_builtins(self.schema.columns) if isinstance(self.schema, Schema) else list(self.column_names)
        data = {"kind": spec.kind, "classes": list(self.classes), "task": self.task, "columns": columns}
        data |= {} if spec.channels is msgspec.UNSET else {"fit": True}
        return {
            "seed": self.seed,
            "method": HANDED_IN if matrix else {"name": "fedavg"},
            "model": {"name": spec.name, **spec.options},
            "data": {**data, "shape": list(spec.shape), "vocabulary": spec.vocabulary},
            "train": {"validation": self.train.validation},  # sites' own scales are those without held-out samples
            "round": {"given": digest} | ({"matrix": True, "quorum": 1, "clients": MOST_OTHERS} if matrix else {}),
        }

    def planned(self, plan: Plan) -> Plan:
        """Return a plan of devices' data with this model, its classes and its scales.

        Raises:
            ShapeMismatch: The data are not what the model takes.
        """
        for what in ("kind", "shape", "per_position", "vocabulary"):
            of_data, needed = getattr(plan.model, what), getattr(self.model, what)
            if of_data != needed:
                raise ShapeMismatch(f"the given model takes data of {what} {needed}, and the devices have {of_data}")
        changes = {"scale": self.scale, "targets": self.targets or plan.targets}
        return msgspec.structs.replace(plan, model=self.model, classes=self.classes, **changes)


def read_network(folder: Path) -> tuple[GivenModel, Tensors]:
    """Read the network of a finished model's folder.

    Raises:
        NoModel: It is missing, damaged, or of another form.
    """
    from attune.common.wire.files import read_tensors

    if folder.suffix == ".onnx":
        raise SettingError(
            f"{folder} is a graph of ONNX, which each site would have to run as a program from elsewhere: evaluate takes the "
            "folder of a finished model (model.json and model.safetensors)"
        )
    try:
        given = from_json(read_small(folder / "model.json", MOST_BYTES), GivenModel)
        return given, read_tensors(folder / "model.safetensors", digest=given.files.get("model.safetensors"))
    except (OSError, WireError, msgspec.DecodeError) as error:
        raise NoModel(f"there is no finished model in {folder} ({error})") from None
