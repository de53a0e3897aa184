"""The limit on the model that devices' data ask for."""

from __future__ import annotations

from attune.common.errors import SettingError
from attune.common.models.size import size_bytes
from attune.common.plan import ModelSpec


def check_size(spec: ModelSpec, most_bytes: int) -> None:
    """Errors: SettingError for a model of more than `most_bytes`, and those of `build`."""
    size = size_bytes(spec)
    if size > most_bytes:
        raise SettingError(
            f"a {spec.name} for {spec.kind} of shape {spec.shape} with {spec.classes} classes has {size:,} bytes; at most "
            f"{most_bytes:,} are allowed (server.max_model_bytes)"
        )
