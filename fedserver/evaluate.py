"""`attune.evaluate`: one evaluation of a given model at all sites, as a run without training over the devices of a home."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attune import seams
from attune.common import homes
from attune.common.aio import run_blocking
from attune.common.config import by_section, load_settings, merge
from attune.common.errors import HomeMismatch, NoModel, SettingError
from attune.common.given_model import GivenModel, read_network
from attune.common.plan import FIRST_RUN, run_name
from attune.common.plugins import check_model_allowed
from attune.fedserver import runs
from attune.fedserver.core.messages import Phase
from attune.fedserver.home import ServerHome

if TYPE_CHECKING:
    from attune.common.wire.tensors import Tensors

NO_SETTINGS: Mapping[str, Any] = {}
FIXED = {"model", "method", "data", "seed"}  # sections that the model decides


def evaluate(
    model: str | Path | None = None, run: str = "", name: str = "", min_clients: int | None = None,
    settings: Mapping[str, Any] = NO_SETTINGS, home: str | Path | None = None, host: str | None = None, port: int | None = None,
    join_uses: int = 1, dashboard: str | int | None = None, allow_code: Collection[str] = (), matrix: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
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
        matrix: Evaluate the networks of all sites that share them (`fedclient --share-model`), in place of one model.
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
    from attune.fedserver.view.homes import status_of, text_of, text_table

    place = ServerHome(Path(home).expanduser() if home is not None else homes.server_home())
    overrides: dict[str, Any] = {}
    present = "" if run else _under_way(place)
    if model is not None or not present:
        if model is None:
            given, tensors = _of_run(place, run, allow_code, matrix)
        elif matrix:
            raise SettingError("a matrix is of the sites' models, which they have: leave --model out")
        else:
            given, tensors = read_network(Path(model).expanduser())
        given.check()
        check_model_allowed(given.model.name, allow_code, "the model")
        if given.left_out:
            say(f"of this blend {given.network} is evaluated; {given.left_out} stay here, as they may hold training samples")
        with place.locked():
            digest = store_given(place.open().blobs, given, tensors)
        if digest != present:
            overrides = _settings(place, settings, min_clients, given.settings(digest, matrix))
            if place.exists():
                _begin(place, name, overrides, say)
                overrides = {}
            forget_others(place.open().blobs, digest)
    if not overrides and present:
        say(f"going on with {run_name(place.snapshot().run)}")
    shown = None if dashboard is None else str(dashboard)
    options = ServerOptions(place.path, host, port, True, say, shown, join_uses=join_uses, allow_code=tuple(allow_code))
    run_blocking(serve(options, overrides))
    snapshot = place.snapshot()
    section = seams.matrix_section(snapshot.rows, snapshot.plan.scored, drawn=False) if snapshot.plan else None
    if section is not None and section.table is not None:
        rows = ([str(cell or "") for cell in row] for row in section.table.rows)
        say(text_of(text_table(section.table.heads, rows), section.caption))
    return status_of(place)


def _of_run(place: ServerHome, run: str, allowed: Collection[str], matrix: bool) -> tuple[GivenModel, Tensors]:
    """Return the common model of a run of a home, or a model like those that its devices share."""
    from attune.fedserver.consent import check_consent
    from attune.fedserver.view.export import common_model

    place.require()
    kept = place if run in ("", run_name(place.snapshot().run)) else ServerHome(place.runs / run)
    kept.require()
    snapshot = kept.snapshot()
    if snapshot.plan is None or (snapshot.plan.matrix and not matrix):
        raise NoModel(
            f"the run {run or run_name(snapshot.run)} has no model of its own: give one (--model), or name a run (--run)"
        )
    check_consent(place, snapshot, allowed)
    if matrix:
        return seams.matrix_of(snapshot.plan)
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
