"""The model that all devices of a plan have in common: the architecture with its initial weights, and the part of each tensor.

Thousands of simulated devices share one. A module only says how to compute, and no tensor of it changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from threading import get_ident
from weakref import WeakValueDictionary

import msgspec
import torch

from attune.common.methods.fit import check_no_batch_statistics
from attune.common.methods.method import ConfiguredMethod, PartKind, assign
from attune.common.methods.registry import configured_on_device
from attune.common.models.registry import build, is_built_in
from attune.common.models.structure import Tensors, components, tensors_of
from attune.common.plan import Plan
from attune.fedclient.work.objectives.base import Network


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
