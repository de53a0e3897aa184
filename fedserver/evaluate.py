"""`attune.evaluate`: one evaluation of a given model at all sites, as a run without training over the devices of a home."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attune.common import homes
from attune.common.aio import run_blocking
from attune.common.config import by_section, load_settings, merge
from attune.common.durable import read_small
from attune.common.errors import HomeMismatch, NoModel, SettingError, WireError
from attune.common.plan import FIRST_RUN, run_name
from attune.common.plugins import check_model_allowed
from attune.common.text import from_json
from attune.fedserver import runs
from attune.fedserver.core.given_model import GivenModel
from attune.fedserver.core.messages import Phase
from attune.fedserver.home import ServerHome

if TYPE_CHECKING:
    from attune.common.wire.tensors import Tensors

MOST_BYTES = 4 << 20  # of model.json: a plan takes no longer one
NO_SETTINGS: Mapping[str, Any] = {}
FIXED = {"model", "method", "data", "seed"}  # sections that the model decides


def evaluate(
    model: str | Path | None = None,
    run: str = "",
    name: str = "",
    min_clients: int | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS,
    home: str | Path | None = None,
    host: str | None = None,
    port: int | None = None,
    join_uses: int = 1,
    dashboard: str | int | None = None,
    allow_code: Collection[str] = (),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Let each site evaluate a model once, without training, and return what `fedserver status --json` prints then.

    It is a run of its own. After a kill, the same call goes on with it. Devices go on predicting with the models that they had.

    Args:
        model: Folder of a finished model; None: the common model of a run.
        run: This run; empty: the present one.
        name: Name of the evaluation's run; empty: evaluation-1, or the next number.
        min_clients: Devices with which it begins; None: all that are enrolled, in a new home 2.
        settings: Further ones, as for `attune.serve`, such as {"train.score": "auroc"}.
        home: Same as for `attune.serve`, like all arguments that are not explained.
        host: Same.
        port: Same.
        join_uses: Same.
        dashboard: Same.
        allow_code: Code of its own that the model may be, by name.
        say: Function that gets each line that the command prints.

    Raises:
        NoModel: There is no such model.
        SettingError: It cannot be evaluated elsewhere.
        HomeMismatch: The present run is not over.
        AttuneError: As for `attune.serve`.
    """
    from attune.fedserver.app import ServerOptions
    from attune.fedserver.app import run as serve
    from attune.fedserver.lab.given import forget_others, store_given
    from attune.fedserver.view.homes import status_of

    place = ServerHome(Path(home).expanduser() if home is not None else homes.server_home())
    overrides: dict[str, Any] = {}
    present = "" if run else _under_way(place)
    if model is not None or not present:
        given, tensors = read_folder(Path(model).expanduser()) if model is not None else _common(place, run, allow_code)
        given.check()
        check_model_allowed(given.model.name, allow_code, "the model")
        if given.left_out:
            say(f"of this blend {given.network} is evaluated; {given.left_out} stay here, as they may hold training samples")
        with place.locked():
            digest = store_given(place.open().blobs, given, tensors)
        if digest != present:
            overrides = _settings(place, settings, min_clients, given.settings(digest))
            if place.exists():
                _begin(place, name, overrides, say)
                overrides = {}
            forget_others(place.open().blobs, digest)
    if not overrides and present:
        say(f"going on with {run_name(place.snapshot().run)}")
    shown = None if dashboard is None else str(dashboard)
    options = ServerOptions(place.path, host, port, True, say, shown, join_uses=join_uses, allow_code=tuple(allow_code))
    run_blocking(serve(options, overrides))
    return status_of(place)


def read_folder(folder: Path) -> tuple[GivenModel, Tensors]:
    """Read the network of a finished model's folder.

    Raises:
        NoModel: It is missing, damaged, or of another form.
    """
    from attune.common.wire.files import read_tensors

    if folder.suffix == ".onnx":
        raise SettingError(
            f"{folder} is a graph of ONNX, which each site would have to run as a program from elsewhere: evaluate takes the "
            "folder of a finished model (model.json and model.safetensors)"
        )
    try:
        given = from_json(read_small(folder / "model.json", MOST_BYTES), GivenModel)
        return given, read_tensors(folder / "model.safetensors", digest=given.files.get("model.safetensors"))
    except (OSError, WireError, msgspec.DecodeError) as error:
        raise NoModel(f"there is no finished model in {folder} ({error})") from None


def _common(place: ServerHome, run: str, allowed: Collection[str]) -> tuple[GivenModel, Tensors]:
    """Return the common model of a run of a home."""
    from attune.fedserver.consent import check_consent
    from attune.fedserver.view.export import common_model

    place.require()
    kept = place if run in ("", run_name(place.snapshot().run)) else ServerHome(place.runs / run)
    kept.require()
    snapshot = kept.snapshot()
    if snapshot.plan is None:
        raise NoModel(f"the run {run or run_name(snapshot.run)} has no model yet: give one (--model), or name a run (--run)")
    check_consent(place, snapshot, allowed)
    return common_model(snapshot, snapshot.plan, kept.open().blobs, kept.path)


def _under_way(place: ServerHome) -> str:
    """Return the digest of the model that the present run evaluates; empty: it is over, or another run."""
    if not place.exists():
        return ""
    snapshot = place.snapshot()
    return "" if snapshot.record.revive().phase is Phase.DONE else snapshot.settings.round.given or ""


def _settings(
    place: ServerHome, settings: Mapping[str, Any], min_clients: int | None, fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all settings of the run.

    Raises:
        SettingError: Some contradict the model.
    """
    asked = by_section(settings)
    if wrong := sorted(asked.keys() & FIXED):
        raise SettingError(f"the section {wrong[0]} follows from the model that is evaluated: leave it out")
    enrolled = sum(not device.revoked for device in place.snapshot().devices) if place.exists() else 0
    count = min_clients or enrolled
    return load_settings(None, (), merge(merge(asked, {"round": {"min_clients": count}} if count else {}), fixed))


def _begin(place: ServerHome, name: str, overrides: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Begin the run.

    Raises:
        HomeMismatch: The present run is not over.
    """
    from attune.fedserver.identity.admin import user

    snapshot = place.snapshot()
    if snapshot.plan is not None and not snapshot.record.round and snapshot.record.revive().phase is not Phase.DONE:
        raise HomeMismatch(f"the run {run_name(snapshot.run)} has begun: start the server, and evaluate when it is over")
    taken = {FIRST_RUN, run_name(snapshot.run), *(path.name for path in place.runs.glob("[!.]*"))}
    free = (f"evaluation-{number}" for number in range(1, len(taken) + 2))
    chosen = name or next(one for one in free if one not in taken)
    kept = runs.begin(place, chosen, overrides, f"operator {user()}")
    say(f"{chosen} begins" + (f"; the run before is kept in {kept}" if kept else ""))
