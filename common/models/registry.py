"""Architectures by name: which there are, what suits which data, and building one; torch is imported only to build."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attune.common.config import convert
from attune.common.errors import AttuneError, SettingError, WireError, nearest
from attune.common.models.options import (
    ClosedFormOptions,
    ConvNetOptions,
    DnnOptions,
    HuggingFaceOptions,
    LstmOptions,
    MlrOptions,
    ModelOptions,
    TransformerOptions,
    UNetOptions,
    VitOptions,
)
from attune.common.plan import POSITIONED, Kind, ModelSpec
from attune.common.plugins import PluginRegistry, imported
from attune.common.text import clean, from_json
from attune.common.wire.digest import check_digest

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelEntry:
    """Description of a model without torch. Entry points of the group `attune.models` name such entries.

    Attributes:
        factory: "package.module:factory", which is called as factory(spec, options) and returns a module.
        options: The struct that the section [model] of the settings is checked against.
        kinds: The kinds of data that the model takes.
        roles: The roles of common.models.structure that its tensors have; None if that depends on its options.
        labels_pixels: It scores every pixel of an image, as no other model does, and nothing else.
    """

    factory: str
    options: type[ModelOptions]
    kinds: tuple[Kind, ...]
    roles: frozenset[str] | None = None
    labels_pixels: bool = False

    def takes(self, kind: Kind, per_position: bool) -> bool:
        """Return whether the model is for data of this kind, labelled by sample or by position."""
        return kind in self.kinds and self.labels_pixels == (per_position and kind == "images")


_HEAD = frozenset({"head"})
_TRANSFORMER = frozenset({"qkv", "head", "norm", "mlp", "encoder"})
_BUILT_IN = {
    "vit": ModelEntry("attune.common.models.vit:VisionTransformer", VitOptions, ("images",), _TRANSFORMER),
    "transformer": ModelEntry(
        "attune.common.models.transformer:SequenceTransformer",
        TransformerOptions,
        ("tokens", "series", "tabular"),
        _TRANSFORMER,
    ),
    "closed-form": ModelEntry(
        "attune.common.models.closed_form:RandomFeatures", ClosedFormOptions, ("images", "series", "tabular"), _HEAD
    ),
    "convnet": ModelEntry("attune.common.models.convnet:make_convnet", ConvNetOptions, ("images", "series"), _HEAD),
    "convnet-bn": ModelEntry(
        "attune.common.models.convnet:make_convnet_bn", ConvNetOptions, ("images", "series"), _HEAD | {"norm"}
    ),
    "lstm": ModelEntry("attune.common.models.lstm:StackedLstm", LstmOptions, ("tokens", "series"), _HEAD),
    "dnn": ModelEntry("attune.common.models.blocks:make_dnn", DnnOptions, ("images", "series", "tabular"), _HEAD),
    "huggingface": ModelEntry("attune.common.models.hugging_face:make", HuggingFaceOptions, ("images", "tokens"), None),
    "mlr": ModelEntry("attune.common.models.blocks:make_mlr", MlrOptions, ("images", "series", "tabular"), _HEAD),
    "unet": ModelEntry("attune.common.models.convnet:UNet", UNetOptions, ("images",), _HEAD | {"norm"}, labels_pixels=True),
}
MODELS: PluginRegistry[ModelEntry] = PluginRegistry("models", ModelEntry, _BUILT_IN)
# Those that learn most from few samples (benchmarks/results/default_training.csv).
_DEFAULTS: dict[Kind, str] = {"images": "convnet", "tokens": "transformer", "series": "dnn", "tabular": "dnn"}
_OTHERS = ("convnet-bn", "vit", "transformer", "unet")  # the first that fits, where data, a method or an option need more
_RANKS: dict[Kind, int] = {"images": 3, "tokens": 1, "series": 2, "tabular": 1}
MAX_SAMPLE_VALUES = 1 << 26  # of one sample, as peers declare it: the size of the model follows from it
MAX_VOCABULARY = 1 << 20
MEASURING_S, MEASURING_BYTES = 120, 4 << 30  # of a process that measures a model
_MEASURE = "from attune.common.models.registry import measure; measure()"
BODY_DIGEST = "body_digest"  # an option of every model of one's own, which its factory does not see


def names() -> list[str]:
    """Return the built-in models, sorted."""
    return sorted(_BUILT_IN)


def model_for(kind: Kind, roles: frozenset[str], options: Collection[str] = (), per_position: bool = False) -> str:
    """Return the default model for this kind of data if it has all these roles and options, else the first that has them.

    If none has all the options, they do not count.

    Raises:
        SettingError: No built-in model has tensors of all these roles.
    """
    fitting = (name for name in [_DEFAULTS[kind], *_OTHERS, *names()] if _BUILT_IN[name].takes(kind, per_position))
    having = [name for name in fitting if _has(name, roles)]
    if not having:
        raise SettingError(
            f"no built-in model for {_described(kind, per_position)} has tensors of the roles {', '.join(sorted(roles))}: "
            "choose another method, or a model of your own"
        )
    return next((name for name in having if set(options) <= _options_of(name)), having[0])


def _has(name: str, roles: frozenset[str]) -> bool:
    has = _BUILT_IN[name].roles
    return has is not None and roles <= has


def _options_of(name: str) -> set[str]:
    return set(_BUILT_IN[name].options.__struct_fields__)


def check_options(name: str | None, options: Mapping[str, Any]) -> None:
    """Check the options of a model before there are data; without a name, that one of the default models has each option.

    Raises:
        SettingError: The model is unknown, lacks an option, or a value has a wrong type or range.
    """
    if name is None:
        known = set[str]().union(*map(_options_of, {*_DEFAULTS.values(), *_OTHERS}))
        for key in options.keys() - known:
            raise SettingError(f"unknown setting model.{key}{nearest(key, known)}")
    elif ":" not in name:
        convert(_entry(name).options, options, "model.")
    elif BODY_DIGEST in options:
        try:
            check_digest(str(options[BODY_DIGEST]), f"setting model.{BODY_DIGEST}")
        except WireError as error:
            raise SettingError(str(error)) from None


def why_not_usual(
    kind: Kind, roles: frozenset[str], method: str, options: Collection[str] = (), per_position: bool = False
) -> str:
    """Explain why `model_for` does not return the default model for this kind of data; empty if it does."""
    usual = model_for(kind, frozenset(), (), per_position)
    chosen = model_for(kind, roles, options, per_position)
    if chosen == usual:
        return ""
    missing = sorted(roles - (_BUILT_IN[usual].roles or frozenset()))
    lacks = (
        f"{', '.join(missing)}, which method {method} needs"
        if missing
        else f"option {sorted({*options} - _options_of(usual))[0]}"
    )
    return f"the usual model for {kind}, {usual}, has no {lacks}"


def check_roles(name: str | None, roles: frozenset[str], method: str) -> None:
    """Check that a built-in model has the parts that the method needs.

    Raises:
        SettingError: The model lacks tensors of one of the roles.
    """
    has = MODELS[name].roles if name is not None and name in MODELS else None
    if has is not None and (missing := roles - has):
        fitting = [other for other in names() if roles <= (_BUILT_IN[other].roles or frozenset())]
        raise SettingError(
            f"model {name} has no tensors of the roles {', '.join(sorted(missing))}, which method {method} needs; "
            f"models that have them: {', '.join(fitting) or 'none of the built-in ones'}"
        )


def default_spec(
    kind: Kind,
    shape: tuple[int, ...],
    classes: int,
    vocabulary: int,
    name: str | None,
    options: Mapping[str, Any],
    per_position: bool = False,
) -> ModelSpec:
    """Return the model for data of this kind, with every default of its options filled in.

    Args:
        kind: The kind of data.
        shape: Shape of one sample: (H, W, C), (T,), (T, C) or (F,).
        classes: The number of outputs.
        vocabulary: The number of tokens; 0 for other kinds.
        name: The model; None takes that of `model_for`.
        options: Its options, without `name`. Those of a user's `package.module:factory` are not checked.
        per_position: Every token or pixel has a label, not every sample.

    Raises:
        SettingError: The model, an option or a value is unknown, or the model does not take this kind of data.
    """
    given = dict(options)
    pin = given.pop(BODY_DIGEST, msgspec.UNSET) if ":" in (name or "") else msgspec.UNSET
    spec = ModelSpec(
        name or model_for(kind, frozenset(), given, per_position),
        kind,
        tuple(shape),
        classes,
        vocabulary,
        given,
        per_position,
        pin,
    )
    if ":" in spec.name:
        _check_data(spec)
        return spec
    return msgspec.structs.replace(spec, options=msgspec.to_builtins(_checked(spec)))


def is_built_in(spec: ModelSpec) -> bool:
    """Return whether it is an architecture of this package, which is always the same code."""
    return spec.name in _BUILT_IN


def build(spec: ModelSpec, seed: int, device: str = "cpu") -> nn.Module:
    """Build a model on `device` whose initial weights depend on `spec` and `seed` alone; random state outside stays as it is.

    Raises:
        SettingError: As `default_spec`; for a factory that cannot be imported or makes no module; and for a frozen body that is
            not the one that `spec` pins.
    """
    import torch

    options: tuple[ModelOptions, ...]
    if ":" in spec.name:
        _check_data(spec)
        factory, options = load(spec.name), ()
    else:
        options = (_checked(spec),)
        factory = load(MODELS[spec.name].factory)
    from attune.common.torch_state import plain_torch, seeded

    with plain_torch(), seeded(torch.device("cpu"), seed, everything=True), torch.device(device):
        model = _made(factory, spec, *options)
    if not isinstance(model, torch.nn.Module):
        raise SettingError(f"model {spec.name} made a {type(model).__name__}; its factory must return a torch.nn.Module")
    if not is_built_in(spec):
        from attune.common.models.usable import check_usable

        check_usable(model, spec.name)
    if spec.feature_mean is True:
        from attune.common.models.feature_mean import add_feature_mean

        add_feature_mean(model, spec.name)
    if device != "meta":  # there are no values to know a body by
        from attune.common.models.body import settle

        settle(model, spec)
    return model


def size_bytes(spec: ModelSpec) -> int:
    """Return the bytes of all tensors of a model, without allocating them: what a peer declares decides how large it is.

    The options of built-in models bound the number of their modules. A config of Hugging Face transformers and the options of a
    package's model do not, so these are built in a process with bounds on time and memory. Sizes are remembered: each of many
    simulated devices asks for them.

    Raises:
        SettingError: As `build`, and for a model that cannot be built within the bounds.
    """
    packaged = ":" not in spec.name and MODELS.package_of(spec.name) is not None
    if not packaged and not is_built_in(spec):
        return _size_of(spec)  # code of this program, or allowed by its name
    return _remembered_size(msgspec.json.encode(spec), packaged or spec.name == "huggingface")


@lru_cache(maxsize=64)
def _remembered_size(spec_json: bytes, apart: bool) -> int:
    spec = from_json(spec_json, ModelSpec)
    if not apart:
        return _size_of(spec)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE], input=spec_json, capture_output=True, timeout=MEASURING_S,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        size, error = from_json(done.stdout.splitlines()[-1], tuple[int, str])
    except (subprocess.TimeoutExpired, IndexError, msgspec.DecodeError):
        size, error = (
            0,
            (
                f"model {spec.name} could not be built within {MEASURING_S} s and {MEASURING_BYTES:,} bytes, even without its "
                "values: choose smaller sizes in its options"
            ),
        )
    if error:
        raise SettingError(error)
    return size


def measure() -> None:
    """Print the size of the model that is described on standard input, or the error, within bounded memory."""
    try:
        import resource
    except ImportError:  # Windows has no such bounds
        pass
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (MEASURING_BYTES, MEASURING_BYTES))
    size, error = 0, ""
    try:
        size = _size_of(from_json(sys.stdin.buffer.read(), ModelSpec))
    except AttuneError as refused:
        error = clean(str(refused), 1000)
    sys.stdout.write("\n" + msgspec.json.encode((size, error)).decode() + "\n")


def _size_of(spec: ModelSpec) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in build(spec, 0, device="meta").state_dict().values())


def _made(factory: Callable[..., Any], spec: ModelSpec, *options: ModelOptions) -> Any:
    """Call a factory.

    Raises:
        SettingError: With whatever the factory raises, such as too little memory for the declared sizes.
    """
    try:
        return factory(spec, *options)
    except SettingError:
        raise
    except ImportError as error:
        raise SettingError(
            f"model {spec.name} needs what is not installed here ({error}): install it on the server and on every device"
        ) from error
    except Exception as error:
        raise SettingError(
            f"model {spec.name} could not be made for {spec.kind} of shape {spec.shape} and {spec.classes} classes: "
            f"{type(error).__name__}: {error}"
        ) from error


def _entry(name: str) -> ModelEntry:
    if name not in MODELS:
        raise SettingError(f"unknown model {name!r}{nearest(name, MODELS)}; package.module:factory names one of your own")
    return MODELS[name]


def _checked(spec: ModelSpec) -> ModelOptions:
    entry = _entry(spec.name)
    if not entry.takes(spec.kind, spec.per_position):
        fitting = ", ".join(name for name in names() if _BUILT_IN[name].takes(spec.kind, spec.per_position))
        what = _described(spec.kind, spec.per_position)
        raise SettingError(f"model {spec.name} does not take {what}; models that do: {fitting or 'none of the built-in ones'}")
    _check_data(spec)
    options = convert(entry.options, spec.options, "model.").resolved(spec.shape)
    if isinstance(options, TransformerOptions) and options.leaky_targets and not spec.per_position:
        raise SettingError("setting model.leaky_targets: there is nothing to leak unless every token of a sequence has a label")
    return options


def _check_data(spec: ModelSpec) -> None:
    if len(spec.shape) != _RANKS[spec.kind] or min(spec.shape) < 1 or math.prod(spec.shape) > MAX_SAMPLE_VALUES:
        raise SettingError(f"no model can be built for {spec.kind} of shape {spec.shape}")
    if spec.classes < 1:
        raise SettingError(f"a model needs at least one class, not {spec.classes}")
    if spec.per_position and spec.kind not in POSITIONED:
        raise SettingError(f"only tokens and images can have a label for every position, not {spec.kind}")
    if spec.kind == "tokens" and not 1 <= spec.vocabulary <= MAX_VOCABULARY:
        raise SettingError(f"a vocabulary holds 1 to {MAX_VOCABULARY} tokens, not {spec.vocabulary}")


def _described(kind: Kind, per_position: bool) -> str:
    return f"{kind} with a label for every {'pixel' if kind == 'images' else 'position'}" if per_position else kind


def load(name: str) -> Callable[..., Any]:
    """Return the function or class `package.module:factory`.

    Raises:
        SettingError: It does not exist or cannot be called, or its module cannot be imported.
    """
    try:
        factory: Any = imported(name)
    except (ImportError, AttributeError, ValueError) as error:
        place = Path(*name.partition(":")[0].split("."))
        here = bool(place.name) and (place.with_suffix(".py").exists() or (place / "__init__.py").exists())
        hint = f", or, since {place} lies in this folder, say PYTHONPATH=. before the command" if here else ""
        raise SettingError(
            f"model {name!r} cannot be imported: {error}; install its package on the server and on every device{hint}"
        ) from None
    if not callable(factory):
        raise SettingError(f"model {name!r} is a {type(factory).__name__}, not a function or class that makes a module")
    made: Callable[..., Any] = factory
    return made
