"""The networks with which a device compares its own: the common one, and on request a local one.

The model that all devices of a plan have in common is the architecture with its initial weights, and the part of each tensor.
Thousands of simulated devices share one. A module only says how to compute, and no tensor of it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from threading import get_ident
from weakref import WeakValueDictionary

import msgspec
import torch

from attune.common.methods.fit import check_no_batch_statistics
from attune.common.methods.method import ConfiguredMethod, Method, PartKind, assign
from attune.common.methods.registry import configured_on_device
from attune.common.methods.settings.objectives import ModelSettings, ObjectiveSettings, SgdSettings
from attune.common.metrics import Choice
from attune.common.models.registry import build, is_built_in
from attune.common.models.structure import components, tensors_of
from attune.common.plan import Plan
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.options import NONE, Hooks
from attune.fedclient.work.build import family_of
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.measures import Measure
from attune.fedclient.work.objectives.base import Network, OnProgress, Tensors, Trained
from attune.fedclient.work.objectives.descent import Sgd
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.task_measures import measure_of
from attune.fedclient.work.trainer import Seeds, Trainer


@dataclass(frozen=True, eq=False)
class SharedModel:
    """Model of a plan.

    Attributes:
        configured: The method.
        network: The architecture, on the torch device that computes.
        initial: Its tensors before training, on the CPU.
        part_of: The part of each tensor.
        components: The names of the tensors of each component.
    """

    configured: ConfiguredMethod
    network: Network
    initial: Tensors
    part_of: Mapping[str, PartKind]
    components: Mapping[str, list[str]]


_SHARED: WeakValueDictionary[Hashable, SharedModel] = WeakValueDictionary()


def shared_model(plan: Plan, device: torch.device) -> SharedModel:
    """Return the model of a plan. Devices of one thread share that of a built-in architecture as long as one of them has it.

    Raises:
        SettingError: The model or the method cannot be built here.
    """
    if not is_built_in(plan.model):
        return _made(plan, device)
    key = (get_ident(), msgspec.json.encode(plan), str(device))
    shared = _SHARED.get(key)
    if shared is None:
        shared = _SHARED[key] = _made(plan, device)
    return shared


def _made(plan: Plan, device: torch.device) -> SharedModel:
    configured, model = configured_on_device(plan), build(plan.model, plan.seed)
    if plan.is_private:
        check_no_batch_statistics(model, plan.model.name)
    part_of = assign(configured.method, model)
    initial = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    return SharedModel(configured, Network(model.to(device), plan.model.vocabulary), initial, part_of, components(model))


Candidates = Mapping[str, tuple[Trainer, Tensors]]  # models, each with what evaluates it


class Baselines:
    """The common and the local model: plain models, trained by SGD, that predict with their own logits.

    Args:
        plan: The plan.
        shared: Says how to compute.
        device: Torch device that computes.
        saved: The local model so far; without it a new one starts if `local`.
        local: Whether there is a local model.
        hooks: A user's own training and scores.
        name: The device's name.

    Attributes:
        trainer: Evaluates them.
    """

    def __init__(
        self, plan: Plan, shared: SharedModel, device: torch.device, saved: Tensors | None, local: bool, hooks: Hooks = NONE,
        name: str = "",
    ) -> None:  # fmt: skip
        self.trainer = Trainer(
            shared.network, Sgd(SgdSettings()), PlainPredictor(ModelSettings()), plan.train, device,
            family=(family_of(plan), "baseline"), hooks=hooks, classes=plan.classes, measure=measure_of(plan), name=name,
        )  # fmt: skip
        self.local: Tensors | None = None
        if local:
            initial = {name: tensor.clone() for name, tensor in shared.initial.items()}
            # In the model's order, not that of a file: sums over tensors are folded in it.
            self.local = {name: (saved or initial)[name] for name in initial}

    def trained(
        self, data: Prepared, seeds: Seeds, progress: OnProgress, cancelled: Callable[[], bool], round_: int
    ) -> Jobs[Trained | None]:
        """Train the local model as in one more order, bit by bit as the method `local` does."""
        if self.local is None:
            return None
        return (
            yield from self.trainer.training(
                self.local, {}, data.train_x, data.train_y, seeds, progress, cancelled, round_=round_
            )
        )

    def keep(self, local: Tensors | None, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from a committed order."""
        self.local, self.trainer.state = local, state

    def candidates(self, common: Tensors) -> Candidates:
        """Return the models that exist, each with what evaluates it.

        Args:
            common: The cold-start model; empty if it cannot be used.
        """
        models: dict[str, tuple[Trainer, Tensors]] = {}
        if common:
            models["common"] = (self.trainer, common)
        if self.local is not None:
            models["local"] = (self.trainer, self.local)
        return models


def own_name(method: Method, part_of: Mapping[str, PartKind]) -> Choice:
    """Return the kind of a method's model: local if all is private, common if all is shared and served, else personalized."""
    if method.predictor == "model" and set(part_of.values()) == {"private"}:
        return "local"
    if method.predictor == "model" and set(part_of.values()) == {"shared"} and method.evaluate == "served":
        return "common"
    return "personalized"


def has_common(part_of: Mapping[str, PartKind], settings: ObjectiveSettings) -> bool:
    """Return whether the cold start is a whole model.

    It is not if some tensors keep their initial values: those that never leave a device, or a head that the objective does not
    train.
    """
    return "private" not in part_of.values() and settings.uses_head


def right_on_test(candidates: Candidates, data: Prepared) -> Jobs[dict[str, torch.Tensor]]:
    """Return which labels of the test part, which has samples, each model predicts, as Trainer.right."""
    right: dict[str, torch.Tensor] = {}
    for name, (trainer, tensors) in candidates.items():
        right[name] = yield from trainer.right(tensors, data.test_x, data.test_y)
    return right


def constant_answer(data: Prepared, measure: Measure) -> float | None:
    """Return the score on the test part of the constant answer that is best for the training part (Measure.constant).

    It is None without samples to train on, or to score. A model that scores no more has learned nothing useful.
    """
    trained, tested = torch.cat([data.train_y, data.validation_y]), data.test_y
    return measure.constant(trained, tested) if len(trained) and measure.can_score(tested) else None
