"""Isolation from what is global in torch: random numbers, the default type of floats, precisions, and flags of its libraries.

Another thread of the program may draw random numbers, or run a federation of its own, and nothing here shall depend on it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

_LOCK = threading.Lock()
_of_thread = threading.local()


@dataclass
class _DefaultGenerator:
    """State of torch's generator of the process: how many blocks need it, their seeds, and what it was before them."""

    blocks: int = 0
    seeds: set[int] = field(default_factory=set)
    before: Tensor = field(default_factory=lambda: torch.empty(0))


_default = _DefaultGenerator()
_OF: Any = torch.backends
_FLAGS: tuple[tuple[Any, str, Any], ...] = (  # whose, which, and as torch has it
    *((owner, "fp32_precision", "none") for owner in (_OF, _OF.mkldnn, _OF.cudnn, _OF.cuda.matmul)),
    *((owner, "fp32_precision", "none") for owner in (_OF.mkldnn.matmul, _OF.mkldnn.conv, _OF.mkldnn.rnn)),
    *((owner, "fp32_precision", "tf32") for owner in (_OF.cudnn.conv, _OF.cudnn.rnn)),
    *((owner, name, on) for owner in (_OF.mkldnn, _OF.cudnn) for name, on in (("enabled", True), ("deterministic", False))),
    (_OF.cudnn, "benchmark", False),
)
_TINY = sys.float_info.min
_PLAIN = (torch.float32, "highest", 0, [plain for _, _, plain in _FLAGS])
_inside, _before = 0, _PLAIN


@contextmanager
def plain_torch() -> Iterator[None]:
    """Let torch be during the block as it is when a program begins, with floats of 32 bits; then what was set counts again."""
    global _inside, _before
    flushed = _TINY / 2 == 0.0  # of this thread, and of those that it starts
    torch.set_flush_denormal(False)
    with _LOCK:
        if not _inside:
            _before = _state()
        _inside += 1
        _set(_PLAIN)
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            _set(_PLAIN if _inside else _before)  # what the block has set ends with it
        torch.set_flush_denormal(flushed)


def _state() -> tuple[torch.dtype, str, int, list[Any]]:
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has set it in torch.backends, which is among the flags
        products = "highest"
    flags = [getattr(owner, name) for owner, name, _ in _FLAGS]
    return torch.get_default_dtype(), products, torch.get_deterministic_debug_mode(), flags


def _set(state: tuple[torch.dtype, str, int, list[Any]]) -> None:
    torch.set_default_dtype(state[0])
    torch.set_float32_matmul_precision(state[1])
    torch.set_deterministic_debug_mode(state[2])
    for (owner, name, _), value in zip(_FLAGS, state[3], strict=True):
        if getattr(owner, name) != value:  # a build or a program may refuse to set it
            setattr(owner, name, value)


def may_draw(model: nn.Module) -> bool:
    """Return whether a model can draw random numbers in training: it has dropout, or layers that are not torch's or ours."""
    return any(
        type(layer).__module__.partition(".")[0] not in ("torch", "attune")
        or (isinstance(layer, _DropoutNd) and layer.p > 0)
        or isinstance(layer, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))
        or (isinstance(of := getattr(layer, "dropout", 0.0), float) and of > 0)
        for layer in model.modules()
    )


@contextmanager
def seeded(device: torch.device, seed: int, everything: bool = False) -> Iterator[None]:
    """Let random numbers in this thread follow from `seed` during the block; those of the program do not change.

    Args:
        device: Where is computed. On accelerators torch has one generator for all threads.
        seed: The seed.
        everything: Whether the whole block draws from a generator of its own. If not, the blocks of `drawing` in it do: for
            a small model each operation that is looked at takes time.
    """
    if device.type != "cpu":
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            yield
        return
    before = getattr(_of_thread, "mode", None)
    _of_thread.mode = _OwnGenerator(seed)
    try:
        with _default_kept(_of_thread.mode.seed), _of_thread.mode if everything else nullcontext():
            yield
    finally:
        _of_thread.mode = before


@contextmanager
def _default_kept(seed: int) -> Iterator[None]:
    """Seed torch's own generator too, for code that asks for it, and put it back when no thread is in such a block."""
    with _LOCK:
        if not _default.blocks:
            _default.before = torch.random.get_rng_state()
        _default.blocks += 1
        _default.seeds.add(seed)  # before it counts: other threads look without the lock
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds accelerators, even those that are not there
    try:
        yield
    finally:
        with _LOCK:
            _default.blocks -= 1
            if not _default.blocks:
                torch.random.set_rng_state(_default.before)
                _default.seeds.clear()


def drawing(draws: bool) -> AbstractContextManager[Any]:
    """Return a block that draws from the generator of the `seeded` block around it, if it draws and there is one."""
    mode = getattr(_of_thread, "mode", None)
    return mode if draws and mode is not None else nullcontext()


def random_state(device: torch.device) -> Tensor:
    """Return the states of the generators from which a computation on the device may draw in this thread."""
    mode = getattr(_of_thread, "mode", None)
    states = [torch.random.get_rng_state() if mode is None else mode.state]
    if device.type != "cpu":
        states.append(torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.mps.get_rng_state())
    return torch.cat(states)


class _OwnGenerator(TorchDispatchMode):
    """Mode of this thread in which operations on the CPU draw from a generator of its own.

    Where code has called torch.manual_seed itself, it gets the numbers that it has asked for.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generator = torch.Generator().manual_seed(seed)
        self.seed = self._generator.initial_seed()

    @property
    def state(self) -> Tensor:
        """State of the generator."""
        return self._generator.get_state()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        draws = torch.Tag.nondeterministic_seeded in func.tags and given.get("generator") is None
        if draws and _is_on_cpu(args, given) and torch.default_generator.initial_seed() in _default.seeds:
            form = _with_generator(func)
            if form is not None:  # without one it draws on accelerators alone, such as attention
                return form(*args, **given, generator=self._generator)
        return func(*args, **given)


def _is_on_cpu(args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    devices = [value.device for value in args if isinstance(value, torch.Tensor)]
    return torch.device(given.get("device") or (devices[0] if devices else "cpu")).type == "cpu"


@lru_cache(maxsize=1000)
def _with_generator(func: Any) -> Callable[..., Any] | None:
    """Return the operation's form that takes a generator, if it has one."""
    needed = {name: kind for name, kind in _arguments(func).items() if name != "generator"}
    for form in (func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())):
        arguments = _arguments(form)
        if arguments.pop("generator", "") and arguments == needed:
            return form  # type: ignore[no-any-return]
    return None


def _arguments(func: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}
