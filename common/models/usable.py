"""Checks of a user's module, and of what it returns.

Kinds of modules that cannot be computed with tensors given by name are refused in one line. Scores are a tensor, or an object
with `.logits`, as Hugging Face models return.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from attune.common.errors import SettingError

_WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def check_usable(model: nn.Module, name: str) -> None:
    """Check that federated training can use the module.

    Raises:
        SettingError: It cannot, or not before it is changed. The message names the layer and the change.
    """
    for path, module in model.named_modules():
        if wrong := _wrong_with(module):
            layer = f"layer {path} of model {name}" if path else f"model {name}"
            raise SettingError(f"{layer} {wrong}")


def _wrong_with(module: nn.Module) -> str:
    """Return why a module cannot be used; empty if it can."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled TorchScript: return the plain module, without torch.jit.script or torch.jit.trace"
    if kind in _WRAPPERS:
        return f"is a {kind}: return the module inside it; a device trains on one processor"
    if kind == "OptimizedModule":
        return "is compiled by torch.compile: return the plain module"
    if getattr(module, "sparse", False) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return f"is an {kind} with sparse gradients, which optimisers and averages here do not take: leave sparse=True out"
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(is_lazy(tensor) for tensor in tensors):
        return f"is a {kind} without sizes: give the size of its inputs, or call the model with a sample in its factory"
    if any(tensor.is_complex() for tensor in tensors):
        return f"is a {kind} with complex numbers: keep their real and imaginary parts as two tensors"
    if any(tensor.is_quantized for tensor in tensors) or kind.startswith("QuantizedLinear"):
        return f"is a {kind} with quantized numbers, which cannot be trained: return the model before quantization"
    return ""


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """Return the scores (B, ..., C) in a model's output.

    Raises:
        SettingError: The output has no scores; the message says what the model returned.
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    what = type(output).__name__
    inside = f" of {', '.join(type(item).__name__ for item in output[:4])}" if isinstance(output, (tuple, list)) else ""
    raise SettingError(
        f"the model {type(model).__name__} returned {what}{inside}, which has no logits: its forward must return a tensor of "
        "scores (B, classes), or an object that has it as .logits"
    )
