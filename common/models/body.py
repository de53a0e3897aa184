"""Frozen body of a model: tensors that each device reads from its own disk and that never travel.

A model has a body if its factory leaves parameters with `requires_grad` off. The body is these parameters, and the persistent
buffers of modules in which no parameter is trained. Parts, blobs and the server's state hold only the rest, such as adapters
and a head. A digest identifies the body, so that all devices train adapters of the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from typing_extensions import Self

from attune.common.errors import SettingError, WireError
from attune.common.homes import place_of
from attune.common.plan import ModelSpec
from attune.common.wire.files import digest_of_tensors, read_tensors

_MARK = "attune_body"  # the attribute of a model that has one


@dataclass(frozen=True, eq=False)
class Body:
    """Frozen tensors of a model.

    Attributes:
        names: Names of the tensors.
        digest: Digest of the safetensors file which the tensors make.
        tensors: The tensors by name. All models of this process with the same body share them. Empty after `forget`.
    """

    names: frozenset[str]
    digest: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: Any) -> Self:
        return self


_BODIES: WeakValueDictionary[str, Body] = WeakValueDictionary()  # by digest


def body_of(model: nn.Module) -> Body | None:
    """Return the body of a model that the registry built, or None."""
    body: Body | None = model.__dict__.get(_MARK)
    return body


def names_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the tensors of the model's body; empty without a body."""
    body = body_of(model)
    return body.names if body else frozenset()


def settle(model: nn.Module, spec: ModelSpec) -> None:
    """Find the body of a new model, and share its tensors with other models that have the same body.

    Raises:
        SettingError: `spec` pins a body, and the model has another one, or none.
        WireError: A tensor of the body cannot be written as plain bytes.
    """
    tensors = _frozen(model)
    digest = digest_of_tensors(tensors) if tensors else ""
    if spec.body_digest and digest != spec.body_digest:
        here = f"the body here has {digest}" if digest else "here no parameter is frozen (requires_grad off)"
        raise SettingError(
            f"model {spec.name}: the federation trains adapters of a frozen body with the digest {spec.body_digest}, "
            f"and {here}. Install the same version of the body's package, or read it from the same file"
        )
    if tensors:
        body = _BODIES.setdefault(digest, Body(frozenset(tensors), digest, {n: tensor.data for n, tensor in tensors.items()}))
        for name, tensor in tensors.items():
            tensor.data = body.tensors[name]
        setattr(model, _MARK, body)


def forget(model: nn.Module) -> None:
    """Release the body's values. The model keeps its structure and cannot compute any more."""
    body = body_of(model)
    if body is None:
        return
    gone = {id(tensor) for tensor in _frozen(model).values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in gone and parameter is not None:
                module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        for key, buffer in module._buffers.items():
            if id(buffer) in gone and buffer is not None:
                module._buffers[key] = torch.empty_like(buffer, device="meta")
    setattr(model, _MARK, Body(body.names, body.digest))


def training_mode(model: nn.Module) -> None:
    """Call `model.train()`, but leave modules whose statistics belong to the body in evaluation mode."""
    model.train()
    for name in names_of(model) & {name for name, _ in model.named_buffers()}:
        model.get_submodule(name.rpartition(".")[0]).training = False


def load_body(module: nn.Module, where: str | Path, leave: Collection[str] = ()) -> nn.Module:
    """Load the weights of a safetensors file into the module, freeze it, and return it.

    Args:
        module: The module to load into.
        where: A path, or "package:file" for a file of an installed package.
        leave: Patterns of tensors in the file that the module does not have, such as "pooler.*".

    Raises:
        SettingError: The file cannot be read, or belongs to another module.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):  # on the device "meta" there are no values to load
        try:
            saved = read_tensors(place_of(str(where)))
            left = {name for name in saved if any(fnmatchcase(name, pattern) for pattern in leave)}
            module.load_state_dict({name: tensor for name, tensor in saved.items() if name not in left})
        except (OSError, ModuleNotFoundError, WireError, RuntimeError) as error:
            raise SettingError(f"the frozen body cannot be read from {where}: {error}") from None
    return module.requires_grad_(False)


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen tensors by name, a tied tensor once."""
    tensors: dict[str, Tensor] = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
    tensors |= {name: buffer for name, buffer in model.named_buffers() if _is_still(model, name)}
    return tensors


def _is_still(model: nn.Module, buffer: str) -> bool:
    """Return whether the buffer is persistent, and the nearest module with parameters around it trains none of them."""
    path, _, key = buffer.rpartition(".")
    if key in model.get_submodule(path)._non_persistent_buffers_set:
        return False
    for around in _outwards(path):
        trained = [parameter.requires_grad for parameter in model.get_submodule(around).parameters()]
        if trained:
            return not any(trained)
    return False


def _outwards(path: str) -> Iterator[str]:
    """Yield the path of a module, then of the module around it, and so on up to the model itself."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
