"""Trial of a model before training: it is built and assigned to the method's parts, and it scores and learns.

B samples, T positions, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError
from attune.common.methods.hypernetwork import travelling
from attune.common.methods.method import SOLVED, ConfiguredMethod, Method, PartKind, assign
from attune.common.models.body import training_mode
from attune.common.models.registry import build
from attune.common.models.structure import components_by_part, head_of, roles, tensors_of
from attune.common.models.usable import logits_of
from attune.common.plan import ModelSpec
from attune.common.task import TaskName
from attune.common.torch_state import seeded

SAMPLES = 2
NO_PRIVACY = PrivacySettings()


def check_model(
    spec: ModelSpec,
    configured: ConfiguredMethod,
    seed: int = 0,
    privacy: PrivacySettings = NO_PRIVACY,
    task: TaskName = "classes",
) -> None:
    """Try the model with the method: build it, assign its tensors to parts, score two samples, and compute gradients.

    Args:
        spec: The model.
        configured: The method.
        seed: Seed of the first weights.
        privacy: Settings of privacy, which say which side adds noise.
        task: The task; of "custom" the user's own measure decides what the scores' shape must be.

    Raises:
        SettingError: It names what is wrong with the model, or what the method needs and the model lacks.
    """
    model, method = build(spec, seed), configured.method
    parts = assign(method, model)
    _check_travelling(model, configured, parts)
    if privacy.on_devices:
        check_no_batch_statistics(model, spec.name)
    if privacy.on_server:
        check_no_shared_buffers(model, parts, spec.name)
    head = head_of(roles(model)) if configured.objective.needs_features or configured.predictor.needs_features else None
    if head == "":
        raise SettingError(
            f"method {method.name} needs a model with a linear head, and {spec.name} has none: name the last layer head"
        )
    _check_scores(spec, model, method, head, any_shape=task == "custom")
    if ":" in spec.name:
        _check_training(spec, model)


def _check_travelling(model: nn.Module, configured: ConfiguredMethod, parts: Mapping[str, PartKind]) -> None:
    """Check the size of what travels where it is not the model's own tensors. Errors are those of `travelling`."""
    tensors, components = tensors_of(model), components_by_part(model, parts)
    for part, settings in configured.aggregators.items():
        values = {name: tensor for name, tensor in tensors.items() if parts[name] == part}
        if part != SOLVED:  # no tensor of the model
            travelling(settings, values, components.get(part, {}))


def check_no_batch_statistics(model: nn.Module, name: str) -> None:
    """Refuse layers that normalise by the samples of a batch, or keep statistics of them.

    Raises:
        SettingError: It names the layer.
    """
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats):
            raise SettingError(
                f"model {name} cannot be trained with privacy.unit: {path} ({type(module).__name__}) has statistics over a "
                "batch, through which a sample changes the gradients of others. Take GroupNorm or LayerNorm in its place"
            )


def check_no_shared_buffers(model: nn.Module, parts: Mapping[str, PartKind], name: str) -> None:
    """Refuse buffers that leave the device, such as running statistics and counters: noise is for trained numbers alone.

    Raises:
        SettingError: It names the buffer.
    """
    for buffer, _ in model.named_buffers():
        if parts.get(buffer, "private") != "private":
            raise SettingError(
                f'model {name} cannot be used with privacy.unit = "client": devices share {buffer}, a statistic of their data. '
                "Take GroupNorm or LayerNorm in the place of BatchNorm, or a method that keeps it private (fedbn)"
            )


def _check_scores(spec: ModelSpec, model: nn.Module, method: Method, head: str | None, any_shape: bool) -> None:
    x = _samples(spec)
    seen: list[bool] = []
    handle = model.get_submodule(head).register_forward_pre_hook(lambda *_: seen.append(True)) if head else None
    model.eval()
    try:
        with torch.no_grad():
            output = model(x)
    except Exception as error:
        # Whatever a user's code raises is an error of this model.
        raise SettingError(
            f"model {spec.name} cannot score a batch of shape {tuple(x.shape)} ({x.dtype}): {type(error).__name__}: {error}"
        ) from error
    finally:
        if handle is not None:
            handle.remove()
    logits = logits_of(output, model)
    wanted = (SAMPLES, *spec.positions, spec.classes)
    if tuple(logits.shape) != wanted and not (any_shape and logits.shape[:1] == (SAMPLES,)):
        sample_or_position = "position" if spec.per_position else "sample"
        raise SettingError(
            f"model {spec.name} gives scores of shape {tuple(logits.shape)} for {SAMPLES} samples; {wanted} is needed, one for "
            f"each of {spec.classes} classes a {sample_or_position}"
        )
    if not logits.is_floating_point():
        raise SettingError(f"model {spec.name} gives scores of type {logits.dtype}; floating-point logits are needed")
    if head and not seen:
        raise SettingError(f"method {method.name} needs what enters the head, but {spec.name} never calls its head {head!r}")


def _check_training(spec: ModelSpec, model: nn.Module) -> None:
    """Check that a user's model has gradients, as a device computes them.

    Raises:
        SettingError: It has none, or its code fails in training mode.
    """
    x = _samples(spec)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    trained = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    training_mode(model)
    try:
        with seeded(torch.device("cpu"), 0, everything=True):
            for parameter in trained.values():
                parameter.requires_grad_()
            logits = logits_of(functional_call(model, {**buffers, **trained}, (x,)), model)
            torch.autograd.grad(logits.float().square().mean(), list(trained.values()), allow_unused=True)
    except Exception as error:
        # Whatever a user's code raises is an error of this model.
        first = next(iter(str(error).strip().splitlines()), "")
        raise SettingError(
            f"model {spec.name} cannot be trained on a batch of shape {tuple(x.shape)}: {type(error).__name__}: {first}"
        ) from error


def _samples(spec: ModelSpec) -> Tensor:
    """Return zeros (B, ...) in the form in which a device prepares samples of this kind."""
    if spec.kind == "tokens":
        return torch.zeros(SAMPLES, *spec.shape, dtype=torch.int64)
    if spec.kind == "images":
        height, width, channels = spec.shape
        return torch.zeros(SAMPLES, channels, height, width)
    return torch.zeros(SAMPLES, *spec.shape)
