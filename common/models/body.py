"""The frozen body of a model: what each device reads for itself, and what never travels.

A factory that leaves parameters with `requires_grad` off makes a model with a body: these parameters, and the persistent
buffers of modules in which nothing is trained. The rest (adapters, a head) is what parts, blobs and the server's state consist
of. A body is known by a digest, so that nobody trains adapters of another one.
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
from attune.common.places import place_of
from attune.common.plan import ModelSpec
from attune.common.wire.digest import Digest
from attune.common.wire.files import read_tensors
from attune.common.wire.header import layout_of
from attune.common.wire.tensors import bytes_of, manifest_of

_MARK = "attune_body"  # the attribute of a model that has one


@dataclass(frozen=True, eq=False)
class Body:
    """tensors: by name, which all models of this process with the same body share; empty once they were forgotten."""

    names: frozenset[str]
    digest: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: Any) -> Self:
        return self


_BODIES: WeakValueDictionary[str, Body] = WeakValueDictionary()  # by digest


def body_of(model: nn.Module) -> Body | None:
    """The body of a model that the registry built, if it has one."""
    found: Body | None = model.__dict__.get(_MARK)
    return found


def names_of(model: nn.Module) -> frozenset[str]:
    """Of the tensors of its body; none without one."""
    body = body_of(model)
    return body.names if body else frozenset()


def settle(model: nn.Module, spec: ModelSpec) -> None:
    """Finds the body of a model that was just made. It must be the pinned one, where there is a pin.

    Errors: SettingError for another body than the pinned one, or for none; WireError for one that has no plain bytes.
    """
    tensors = _frozen(model)
    digest = digest_of(tensors) if tensors else ""
    if spec.body_digest and digest != spec.body_digest:
        here = f"the body here has {digest}" if digest else "here no parameter is frozen (requires_grad off)"
        raise SettingError(
            f"model {spec.name}: the federation trains adapters of a frozen body with the digest {spec.body_digest}, "
            f"and {here}. Install the same version of the body's package, or read it from the same file"
        )
    if tensors:
        body = _BODIES.setdefault(digest, Body(frozenset(tensors), digest, {name: each.data for name, each in tensors.items()}))
        for name, tensor in tensors.items():
            tensor.data = body.tensors[name]
        setattr(model, _MARK, body)


def forget(model: nn.Module) -> None:
    """Lets go of the body's values: what is left says how the model is built, and can compute nothing."""
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
    """`model.train()`, but for modules with statistics that are of the body: these stay as they are."""
    model.train()
    for name in names_of(model) & {name for name, _ in model.named_buffers()}:
        model.get_submodule(name.rpartition(".")[0]).training = False


def load_body(module: nn.Module, where: str | Path, leave: Collection[str] = ()) -> nn.Module:
    """The module, with the weights of a safetensors file, and frozen.

    where: a path, or "package:file" for one that an installed package carries. leave: patterns of tensors that the file has and
    the module has not, such as "pooler.*". Errors: SettingError without such a file, or for one that is not of this module.
    """
    if not any(parameter.is_meta for parameter in module.parameters()):  # else only sizes are asked for
        try:
            saved = read_tensors(place_of(str(where)))
            left = {name for name in saved if any(fnmatchcase(name, pattern) for pattern in leave)}
            module.load_state_dict({name: tensor for name, tensor in saved.items() if name not in left})
        except (OSError, ModuleNotFoundError, WireError, RuntimeError) as error:
            raise SettingError(f"the frozen body cannot be read from {where}: {error}") from None
    return module.requires_grad_(False)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """That of the safetensors file which these tensors make."""
    layout, digest = layout_of(manifest_of(tensors)), Digest()
    digest.update(layout.header)
    for name in layout.manifest:
        digest.update(bytes_of(tensors[name]))
    return digest.text


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """By name, a tied tensor once."""
    found: dict[str, Tensor] = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    found |= {name: buffer for name, buffer in model.named_buffers() if _is_still(model, name)}
    return found


def _is_still(model: nn.Module, buffer: str) -> bool:
    """Whether it is saved with the model, and nothing is trained where it lies: in the nearest module with parameters."""
    path, _, key = buffer.rpartition(".")
    if key in model.get_submodule(path)._non_persistent_buffers_set:
        return False
    for around in _outwards(path):
        trained = [parameter.requires_grad for parameter in model.get_submodule(around).parameters()]
        if trained:
            return not any(trained)
    return False


def _outwards(path: str) -> Iterator[str]:
    """The path of a module, of the module around it, and so on to the model itself."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
