"""How large a model is, before there is one: what devices declare decides it."""

from __future__ import annotations

from attune.common.errors import SettingError
from attune.common.models.registry import build
from attune.common.plan import ModelSpec


def check_size(spec: ModelSpec, most_bytes: int) -> None:
    """Errors: SettingError for a model of more than `most_bytes`, and those of `build`."""
    model = build(spec, 0, device="meta")
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if size > most_bytes:
        raise SettingError(
            f"a {spec.name} for {spec.kind} of shape {spec.shape} with {spec.classes} classes has {size:,} bytes; at most "
            f"{most_bytes:,} are allowed (server.max_model_bytes)"
        )
