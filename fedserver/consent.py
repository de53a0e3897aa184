"""Consent of this user to the code that a home names: models `module:factory`, and packages of plug-ins.

A home or a backup can be a stranger's. So consent lies outside of it, beside the default homes, by the federation's fingerprint
and the name of the code. What is named on a command line has consent. The default home counts as this user's: what it
names when its federation is first met, as after an upgrade, has consent, and no other code that is named there later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import msgspec

from attune.common import homes
from attune.common.durable import write_file
from attune.common.errors import HomeMismatch, SettingError
from attune.common.exchange.registry import TRANSFORMS
from attune.common.identity.credential import fingerprint_of
from attune.common.methods.registry import METHODS
from attune.common.methods.settings.aggregators import SETTINGS as AGGREGATORS
from attune.common.methods.settings.objectives import OBJECTIVES, PREDICTORS
from attune.common.models.registry import MODELS
from attune.common.text import clean, from_json, newer_format
from attune.fedserver.identity.authority import CERTIFICATE_FILE
from attune.fedserver.ports.ledger import Snapshot

if TYPE_CHECKING:  # a simulation, whose home is no server's, imports no database
    from attune.fedserver.home import ServerHome

FILE = "consent.json"


class Consents(msgspec.Struct, frozen=True):
    """Content of consent.json: names of code by federation."""

    federations: dict[str, list[str]] = {}
    format: int = 1


_OFFERS = (METHODS, AGGREGATORS, OBJECTIVES, PREDICTORS, MODELS, TRANSFORMS)


def code_in(settings: Mapping[str, Any]) -> set[str]:
    """Return the code that settings name, by section as in federation.toml; none of it is loaded."""
    of_model = settings.get("model", {})
    models = {str(of_model.get("name") or ""), *_words(of_model.get("variant"))}
    words = {*models, *_words(settings.get("method")), *_words(settings.get("transforms"))}
    packages = {package.name for word in words for offers in _OFFERS if (package := offers.package_of(word))}
    return packages | {model for model in models if ":" in model}


def _words(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield str(name)
            yield from _words(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _words(inner)


def code_of(snapshot: Snapshot) -> set[str]:
    """Return all code that a ledger names."""
    plan, race = snapshot.plan, snapshot.race
    several = [snapshot.overrides or {}]
    if race is not None:
        several += [race.overrides, *race.entrants.values()]
    if plan is not None:
        method = {**plan.method_options, "name": plan.method}
        model = {"name": plan.model.name, "variant": [spec.name for spec in plan.variants.values()]}
        several.append({"model": model, "method": method, "transforms": plan.transforms})
    return set[str]().union(*map(code_in, several))


def check_consent(home: ServerHome, snapshot: Snapshot, allowed: Collection[str], source: Path | None = None) -> None:
    """Refuse a home that names code without consent, before any of it is loaded; keep what is allowed now.

    Args:
        home: The home.
        snapshot: What its ledger holds.
        allowed: Names that the user has allowed, or given as settings.
        source: Of what the home is made, for the error; None: it is there already.

    Raises:
        SettingError: It names the code, and how to allow it.
    """
    names = code_of(snapshot)
    if not names:
        return
    federation = _federation_of(home, snapshot)
    kept = _read().get(federation)
    if kept is None and source is None and _is_default(home):
        kept = list(names)
    if missing := sorted(names - {*(kept or ()), *allowed}):
        shown = clean(missing[0])
        raise SettingError(
            f"{source or home.path} names code of its own, {shown}, which would run here, and you have not allowed it for this "
            f"federation: if you trust it, add --allow-code {shown}"
        )
    keep_consent(home, federation, names)


def keep_consent(home: ServerHome, federation: str, names: Collection[str]) -> None:
    """Keep that this code may run for a federation, durably. That a default home names none is kept too."""
    if not names and not _is_default(home):
        return
    path = _path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with filelock.FileLock(path.with_suffix(".lock")):
        kept = _read()
        known = {federation: sorted({*kept.get(federation, ()), *names})}
        if kept | known != kept:
            write_file(path, msgspec.json.format(msgspec.json.encode(Consents(kept | known))))


def allow_code(home: ServerHome, settings: Mapping[str, Any]) -> None:
    """Keep that the code which a user's settings name may run in this home."""
    keep_consent(home, _federation_of(home, home.snapshot()), code_in(settings))


def _federation_of(home: ServerHome, snapshot: Snapshot) -> str:
    """Return the fingerprint of the federation; before round 1 by its certificate, empty without one."""
    if snapshot.plan is not None:
        return snapshot.plan.federation
    path = home.authority / CERTIFICATE_FILE
    return fingerprint_of(path.read_bytes()) if path.exists() else ""


def _is_default(home: ServerHome) -> bool:
    try:
        return home.path.resolve().is_relative_to(homes.server_home().resolve())
    except SettingError:  # this user has no home folder
        return False


def _path() -> Path:
    return homes.root() / FILE


def _read() -> dict[str, list[str]]:
    path = _path()
    try:
        text = path.read_bytes()
        if newer := newer_format(text, path, "fedserver"):
            raise HomeMismatch(newer)
        return from_json(text, Consents).federations
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise HomeMismatch(f"{path} is damaged ({error}): remove it, and allow code again by --allow-code") from None
