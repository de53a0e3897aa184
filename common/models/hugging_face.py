"""Models of Hugging Face transformers, made from a config with new weights. No file is downloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from attune.common.errors import SettingError
from attune.common.models.options import HuggingFaceOptions
from attune.common.plan import ModelSpec

OWN_CODE = ("eager", "sdpa", "batched_mm", "grouped_mm")  # other names of an implementation may load a kernel of the Hub


def make(spec: ModelSpec, options: HuggingFaceOptions) -> nn.Module:
    """Return a model of the architecture `options.type` for images or tokens; its output has `.logits`.

    `options.config` sets the sizes. Sizes that follow from the data are filled in where the config leaves them out.

    Raises:
        SettingError: transformers is not installed, or cannot make such a model of its own code.
    """
    _check_own_code(options.config)
    try:
        import transformers
    except ImportError:
        raise SettingError("model huggingface needs transformers: pip install 'attune-fl[huggingface]'") from None
    values = {"return_dict": True, "num_labels": spec.classes, **_sizes(spec), **options.config}
    try:
        with _offline():
            config = transformers.AutoConfig.for_model(options.type, **values)
            model: nn.Module = _auto(transformers, spec).from_config(config)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError, OSError) as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0][:300]
        raise SettingError(f"no Hugging Face model {options.type!r} for {spec.kind} can be made: {reason}") from None
    return model


def _check_own_code(config: Mapping[str, Any], chooses_code: bool = False) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _check_own_code(value, key.endswith("_implementation"))
        elif (chooses_code or key.endswith("_implementation")) and value not in (None, *OWN_CODE):
            raise SettingError(f"model.config: the implementation {value!r} may be other code: take {', '.join(OWN_CODE)}")


@contextmanager
def _offline() -> Iterator[None]:
    """Let nothing be downloaded during the block: a config can name a body on the Hub."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _auto(transformers: Any, spec: ModelSpec) -> Any:
    labelled = "Image" if spec.kind == "images" else "Token" if spec.per_position else "Sequence"
    return getattr(transformers, f"AutoModelFor{labelled}Classification")


def _sizes(spec: ModelSpec) -> dict[str, Any]:
    if spec.kind == "images":
        height, width, channels = spec.shape
        return {"image_size": height if height == width else [height, width], "num_channels": channels}
    return {"vocab_size": spec.vocabulary, "pad_token_id": 0}
