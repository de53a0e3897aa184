"""Seams: every place where the core calls a feature, in the order of a run. docs/seams.md is made from this module.

A feature is a folder `features/NAME`. Its `feature.py` has one FEATURE, which names what answers the seams. The core imports
no feature: it calls a seam. At most one feature answers a seam. A seam's body is what happens without that feature: less, or
a refusal that names it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import msgspec

from attune.common.errors import SettingError

if TYPE_CHECKING:
    from asyncio import Future

    from attune.common.config import ServerSettings
    from attune.common.given_model import GivenModel
    from attune.common.pictures.figures import Section
    from attune.common.plan import Plan
    from attune.common.task import ScoredTask
    from attune.common.wire.tensors import Tensors
    from attune.fedclient.work.processes.remote_executor import RemoteExecutor
    from attune.fedserver.core.records import Report
    from attune.fedserver.federation.coordinator import Coordinator
    from attune.fedserver.home import ServedAddress, ServerHome
    from attune.fedserver.identity.admin import FederationAdmin
    from attune.fedserver.identity.registrar import Registrar
    from attune.fedserver.ports.blobs import Blobs
    from attune.fedserver.ports.ledger import Snapshot
    from attune.fedserver.ports.storage import HomeStorage, Storage

F = TypeVar("F", bound=Callable[..., Any])
Watch = Callable[["Coordinator", "Storage"], AbstractContextManager[None]]
FOLDER = Path(__file__).parent / "features"
# Commands of `fedserver` and of `fedclient`, and the features that have them.
COMMANDS = {
    "dashboard": "web",
    "dashboard-token": "web",
    "migrate": "remote",
    "plot": "pictures",
    "report": "report",
}
DEVICE_COMMANDS = {"plot": "finished", "watch": "finished"}
SEAMS: dict[str, Callable[..., Any]] = {}  # by name, in the order of a run


class FeatureNames(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a feature, as names. Each place is "module:attribute" of its folder, which is imported when it is used.

    Attributes:
        name: Name of the folder.
        rank: Place among the features, which are asked in this order.
        answers: Place of the answer to each seam.
        commands: Place of each command that it adds to `fedserver`.
        device_commands: Likewise to `fedclient`.
        packages: Packages that a server needs for it.
    """

    name: str
    rank: int
    answers: Mapping[str, str] = {}
    commands: Mapping[str, str] = {}
    device_commands: Mapping[str, str] = {}
    packages: tuple[str, ...] = ()


class Running(NamedTuple):
    """A federation that this process serves. `admin_of` gives the decisions of somebody whom the audit log names."""

    coordinator: Coordinator
    registrar: Registrar
    admin_of: Callable[[str], FederationAdmin]


@cache
def features() -> tuple[FeatureNames, ...]:
    """Return the features of this installation, in the order of their ranks."""
    names = sorted(path.parent.name for path in FOLDER.glob("*/feature.py"))
    here = (import_module(f"attune.features.{name}.feature").FEATURE for name in names)
    return tuple(sorted(here, key=lambda feature: feature.rank))


def absent(feature: str, what: str) -> SettingError:
    """Return the refusal of something that needs a feature which is not here."""
    return SettingError(f"{what} needs the feature {feature!r}, which is not in this installation of attune")


def answer(of: str, name: str) -> Any:
    """Return what a feature has at the place that its field `of` gives for this name; None: no feature has one."""
    places = ((feature.name, getattr(feature, of).get(name)) for feature in features())
    return next((resolve_name(f"attune.features.{feature}.{place}") for feature, place in places if place), None)


def seam(default: F) -> F:
    """Make a seam of a function, whose body is what happens without the feature that answers."""

    @wraps(default)
    def asked(*arguments: Any, **named: Any) -> Any:
        return (answer("answers", default.__name__) or default)(*arguments, **named)

    SEAMS[default.__name__] = asked
    return cast(F, asked)


# --- the server


class NeverServed(Exception):
    """End of a process by a signal, while it waited in `only_server`."""


@seam
def remote_storage(folder: Path, ledger: str, blobs: str) -> HomeStorage:
    """Return the storage of the home `folder`, whose ledger and blobs have these URLs."""
    raise absent("remote", f"state in {blobs} (--ledger and --blobs)")


@seam
@asynccontextmanager
async def only_server(
    home: ServerHome, address: ServedAddress, dashboard: str | None, say: Callable[[str], None], signalled: Future[str]
) -> AsyncIterator[None]:
    """Hold the home and its storage during the block, as soon as no other server does.

    `address` is where this process will serve devices, `dashboard` the value of that option, and `say` gets each line for the
    operator. `signalled` gets the name of the signal that ends this process: then NeverServed is raised. HomeBusy: a server
    runs on the home itself.
    """
    with home.locked():
        yield


@seam
@contextmanager
def page(
    home: ServerHome, asked: str | None, address: ServedAddress, server: ServerSettings, life: Running | str
) -> Iterator[str | None]:
    """Show the federation to browsers and monitors during the block, which gets the address of the page or None.

    `asked` is the value of `--dashboard`, and `address` is where devices find the server. `life` is the federation that runs,
    or the reason why a standby waits.
    """
    if asked not in (None, "off"):
        raise absent("web", f"--dashboard {asked}")
    if server.metrics_token_file:
        raise absent("web", "setting server.metrics_token_file")
    yield None


# --- devices, and a simulation


@seam
def ray_workers(size: int | None = None) -> RemoteExecutor:
    """Return the executor "ray": so many workers of a Ray cluster, by default one for each processor."""
    raise absent("cluster", "the executor 'ray'")


@seam
def watch(dashboard: bool | int | str) -> Watch:
    """Return the page of a simulation, for `attune.simulate(dashboard=...)`; it is served while the federation runs."""
    raise absent("web", "a dashboard")


@seam
def pictures_of(snapshot: Snapshot, blobs: Blobs, wanted: Sequence[str]) -> tuple[str, list[Section]]:
    """Return the title and the sections of a simulation's pictures, of which `wanted` are drawn, or all that are possible."""
    raise absent("pictures", "plot")


# --- results


@seam
def matrix_of(plan: Plan) -> tuple[GivenModel, Tensors]:
    """Return a model like those of a run's devices, of which the ones that are shared are evaluated everywhere.

    SettingError: No model of this run may leave its site, or all sites have one model.
    """
    raise absent("matrix", "--matrix")


@seam
def matrix_section(rows: Sequence[Report], task: ScoredTask, drawn: bool) -> Section | None:
    """Return how each site's network scores at each other site, by devices' reports; None: no network was shared.

    `drawn`: with a picture beside the table.
    """
    return None


@seam
def report(out: str | Path, question: str = "", home: str | Path | None = None, run: str = "") -> Path:
    """Write one page about a run of a server's home for people who decide, also beside a running server; return its path.

    Args:
        out: The file.
        question: What is to be decided, for the head of the page.
        home: The home, or the folder of a run; None: the default home of this user.
        run: Name of an earlier run; empty: the present one.

    Raises:
        HomeMismatch: There is no such federation or run.
        NoModel: The run has no plan yet.
        SettingError: The file cannot be written.
    """
    raise absent("report", "a report")


@seam
def write_report(out: Path, snapshot: Snapshot, status: Mapping[str, Any], question: str = "") -> Path:
    """Write the page of a run of which the ledger's contents and the object of `fedserver status --json` are at hand."""
    raise absent("report", "a report")
