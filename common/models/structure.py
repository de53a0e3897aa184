"""Role of each tensor of a model, found by the model's structure: attention projections, norms, blocks, head, components."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from attune.common.models.body import names_of

Tensors = dict[str, Tensor]
K = TypeVar("K", bound=str)
ROLES = ("qkv", "head", "norm", "mlp", "encoder")

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)
_HEAD_NAMES = {"head", "classifier", "fc"}
_OUTPUT_NAMES = {"out", "to_out", "out_proj", "o_proj", "wo", "w_o", "c_proj", "proj", "to_o", "o"}
_AFFIXES = re.compile(r"^(to|w|in|proj|linear|lin|fc)_|_(proj|linear|lin|layer|weight|bias|w)$")
_PROJECTIONS = {
    "q": "q", "query": "q", "queries": "q", "wq": "q",
    "k": "k", "key": "k", "keys": "k", "wk": "k",
    "v": "v", "value": "v", "values": "v", "wv": "v",
    "kv": "kv", "key_value": "kv", "wkv": "kv",
    "qkv": "qkv", "query_key_value": "qkv", "wqkv": "qkv", "c_attn": "qkv",
}  # fmt: skip
_WHOLE = ({"qkv"}, {"q", "kv"}, {"q", "k", "v"})


def tensors_of(model: nn.Module) -> Tensors:
    """Return parameters and persistent buffers by name, detached but not copied, in the order of modules.

    A tied tensor occurs once, under its first name. A frozen body (common.models.body) is left out, because it never travels.
    """
    return {name: tensor.detach() for name, tensor, _, _ in _walk(model)}


def components(model: nn.Module) -> dict[str, list[str]]:
    """Return for each component the names of its tensors, in model order. Together they are exactly `tensors_of`.

    A component is a leaf module with parameters (FedMCSA's layers). A parameter of a module that has children, and every
    persistent buffer, is a separate component, because running statistics would dominate the direction of a layer's weights.
    """
    result: dict[str, list[str]] = {}
    for name, _, prefix, is_layer in _walk(model):
        result.setdefault((prefix or "model") if is_layer else name, []).append(name)
    return result


def components_by_part(model: nn.Module, part_of: Mapping[str, K]) -> dict[K, dict[str, list[str]]]:
    """Return for each part the names of its tensors, by component."""
    parts: dict[K, dict[str, list[str]]] = {}
    for component, names in components(model).items():
        for name in names:
            parts.setdefault(part_of[name], {}).setdefault(component, []).append(name)
    return parts


def roles(model: nn.Module) -> dict[str, frozenset[str]]:
    """Return for every tensor of `tensors_of` the roles (of ROLES) that it has.

    - qkv: the projections to queries, keys and values of any attention.
    - norm: a whole normalisation layer, with its running statistics.
    - head: the last Linear inside an attribute `head`, `classifier` or `fc`, else the last Linear outside the blocks.
    - encoder: the repeated blocks.
    - mlp: the Linear layers of the blocks that belong to no attention.
    """
    names = list(tensors_of(model))
    blocks = _blocks(model)
    qkv, attentions = _attention(model, blocks)
    head = _head(model, blocks, names)
    norms = [path for path, module in model.named_modules() if _is_norm(module)]
    mlp = [
        path
        for path, module in model.named_modules()
        if _is_linear(module) and _within(path, blocks) and not _within(path, qkv | attentions)
    ]
    owners = {"qkv": qkv, "head": head, "norm": norms, "mlp": mlp, "encoder": blocks}
    return {name: frozenset(role for role in ROLES if _within(name, owners[role])) for name in names}


def head_of(known: Mapping[str, frozenset[str]]) -> str:
    """Return the path of the layer with the role head, from `roles`; empty if there is none."""
    return next((name.rpartition(".")[0] for name, of in known.items() if "head" in of), "")


def _walk(model: nn.Module) -> Iterator[tuple[str, Tensor, str, bool]]:
    """Yield (name, tensor, path of its module, whether it is a parameter of a leaf module)."""
    seen, still = set[int](), names_of(model)
    for prefix, module in model.named_modules():
        leaf = next(module.children(), None) is None
        kept = (
            (key, tensor, False) for key, tensor in module._buffers.items() if key not in module._non_persistent_buffers_set
        )
        for key, tensor, is_parameter in (*((key, tensor, True) for key, tensor in module._parameters.items()), *kept):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                if (name := _join(prefix, key)) not in still:
                    yield name, tensor, prefix, leaf and is_parameter


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _within(name: str, paths: Iterable[str]) -> bool:
    return any(not path or name == path or name.startswith(path + ".") for path in paths)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or (type(module).__name__.endswith("Norm") and next(module.children(), None) is None)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # a linear layer of Hugging Face's GPT-2


def _blocks(model: nn.Module) -> list[str]:
    """Return the paths of repeated blocks: children of one composite class in a ModuleList or a Sequential.

    A Sequential counts if it has several children, or an attention.
    """
    blocks: list[str] = []
    for path, module in model.named_modules():
        if _within(path, blocks) or not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
            continue
        first = module[0]
        alike = all(type(child) is type(first) for child in module)
        composite = all(any(True for _ in child.children()) and any(True for _ in child.parameters()) for child in module)
        repeated = isinstance(module, nn.ModuleList) or len(module) > 1 or any(map(_projections, module.modules()))
        if alike and composite and repeated:
            blocks += [_join(path, key) for key, _ in module.named_children()]
    return blocks


def _projection(name: str) -> str | None:
    """Return the projection that an attribute's name stands for (q, k, v, kv or qkv), or None."""
    name = name.lower()
    if name in ("in_proj_weight", "in_proj_bias"):
        return "qkv"
    while name not in _PROJECTIONS:
        shorter = _AFFIXES.sub("", name, count=1)
        if shorter == name:
            return None
        name = shorter
    return _PROJECTIONS[name]


def _projections(module: nn.Module) -> list[str]:
    """Return the direct attributes of a module that project to queries, keys and values; empty if one of them is missing."""
    keys = [key for key, child in module.named_children() if any(True for _ in child.parameters())]
    keys += [key for key, tensor in module._parameters.items() if tensor is not None]
    named = {key: _projection(key) for key in keys}
    kinds = {kind for kind in named.values() if kind}
    return [key for key, kind in named.items() if kind] if any(whole <= kinds for whole in _WHOLE) else []


def _attention(model: nn.Module, blocks: list[str]) -> tuple[set[str], set[str]]:
    """Return the paths of the projections, and of everything else that belongs to an attention, such as its output layer."""
    qkv: set[str] = set()
    attentions: set[str] = set()
    for path, module in model.named_modules():
        keys = _projections(module)
        qkv.update(_join(path, key) for key in keys)
        if keys and (not path or path in blocks):  # the block itself is the attention: its MLP lies beside the projections
            attentions.update(_join(path, key) for key, _ in module.named_children() if key.lower() in _OUTPUT_NAMES)
        elif keys:
            attentions.add(_outermost_attention(path, blocks))
    return qkv, attentions


def _outermost_attention(path: str, blocks: list[str]) -> str:
    """Return the outermost module around `path`, inside its block, whose name says attention.

    BERT keeps the output layer of an attention there.
    """
    parts = path.split(".")
    start = max((len(block.split(".")) for block in blocks if _within(path, [block])), default=0)
    for depth in range(start, len(parts)):
        if "attn" in parts[depth].lower() or "attention" in parts[depth].lower():
            return ".".join(parts[: depth + 1])
    return path


def _head(model: nn.Module, blocks: list[str], names: list[str]) -> list[str]:
    """Return the path of the head as a list of one, or an empty list.

    Only a layer with trained tensors counts, because a frozen body may have a head of its own.
    """
    trained = {name.rpartition(".")[0] for name in names}
    linears = [path for path, module in model.named_modules() if _is_linear(module) and path in trained]
    outside = [path for path in linears if not _within(path, blocks)]
    named = [path for path in outside if _HEAD_NAMES & set(path.lower().split("."))]
    return (named or outside or linears)[-1:]
