"""`fedclient partition`: from what was typed to shards on disk, a picture and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attune.common.config import parse_assignment
from attune.common.errors import SettingError
from attune.fedclient.partition.schemes import registry

_OLDER = ("classes_per_client", "alpha")  # flags that were never refused where they have no effect


@dataclass(frozen=True)
class Request:
    """The command's options as typed; None or empty if not given."""

    dataset: str | None
    scheme: str
    clients: int | None
    seed: int
    out: Path
    assignments: Sequence[str] = ()
    flags: dict[str, Any] | None = None  # settings of schemes that have a flag of their own
    label: str = ""
    apart: Sequence[str] = ()
    shape: str = ""
    missing: str = "refuse"
    normalise: str | None = None
    noise: float = 0.0


def run(request: Request, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Cuts the data, writes the shards and prints the result. Errors: SettingError, ShardError and its subclasses, DiskFull."""
    settings = _settings(request, warn)
    from attune.fedclient.partition import split as parts
    from attune.fedclient.partition.datasets import load_source
    from attune.fedclient.partition.picture import save_picture, table

    source = None
    if request.dataset is not None:
        named = [settings[key] for key in ("by", "group") if settings.get(key)]
        apart = (*request.apart, *(str(name) for name in named))
        source = load_source(request.dataset, request.seed, request.label, apart, request.shape, request.missing)
    made = parts.partition(
        source, request.scheme, request.clients, request.seed, normalise=request.normalise, noise=request.noise, **settings
    )
    parts.write_shards(request.out, made)
    say(table(made))
    for note in made.notes:
        say(f"note: {note}")
    save_picture(made, request.out / "partition.png")
    say(f"shards in {request.out}, picture in {request.out / 'partition.png'}")


def _settings(request: Request, warn: Callable[[str], None]) -> dict[str, Any]:
    """The scheme's settings: --set, then flags. Errors: SettingError for what the scheme does not have."""
    known = registry.fields(registry.get(request.scheme))
    settings: dict[str, Any] = {}
    for text in request.assignments:
        path, value = parse_assignment(text)
        if len(path) != 1:
            raise SettingError(f"--set takes KEY=VALUE here, with a setting of scheme {request.scheme}, not {text!r}")
        settings[path[0]] = value
    for key, value in (request.flags or {}).items():
        if value is None:
            continue
        if key in _OLDER and key not in known:
            warn(f"scheme {request.scheme} has no --{key.replace('_', '-')}; it is ignored")
            continue
        settings[key] = value
    return settings
