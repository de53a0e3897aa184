"""`fedserver plot`: pictures of a home, also beside its running server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from typing_extensions import Self

from attune import seams
from attune.common.errors import NoModel, SettingError
from attune.common.pictures import figures
from attune.common.pictures.figures import Format
from attune.features.pictures import plot_accuracy, plot_clients, plot_devices
from attune.fedserver.core.accuracy import comparisons
from attune.fedserver.home import ServerHome
from attune.fedserver.lab.aggregators import stored
from attune.fedserver.lab.aggregators.stored import ArrayFile
from attune.fedserver.ports.blobs import Blobs, blob_of, read_again
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.summary import summarise

T = TypeVar("T")


class PictureSource:
    """Data from which the pictures of one federation are drawn."""

    def __init__(self, look: Callable[[], Snapshot], blobs: Blobs, where: str) -> None:
        """Read the ledger's snapshot and summarise it.

        Args:
            look: Returns the present snapshot.
            blobs: The blobs of the state.
            where: The name of the federation in errors.

        Raises:
            NoModel: No round is closed yet.
        """
        snapshot = look()
        if snapshot.plan is None or not snapshot.rows:
            raise NoModel(f"{where} has no rounds yet: there is nothing to draw before the first is closed")
        self._look, self._blobs, self._where, self.rows = look, blobs, where, snapshot.rows
        self.closed, self.task = snapshot.record.round, snapshot.plan.scored
        settings, plan = snapshot.settings, snapshot.plan
        self.summary = summarise(snapshot.rows, settings, plan.model.name, self.closed, plan.scored)
        self.evaluated = comparisons(snapshot.rows)
        self.groups = by_classes({device.name: device.labels for device in snapshot.devices if device.labels})

    @classmethod
    def of_home(cls, home: ServerHome) -> Self:
        """Return the data of a home; errors as for the constructor."""
        return cls(home.snapshot, home.open().blobs, str(home.path))

    def tensors(self, key: str, read: Callable[[ArrayFile], T]) -> T | None:
        """Return what `read` makes of the slot `key` of whichever part has one; None if no part has."""

        def read_slot() -> T | None:
            slot = next((slot for slot in self._look().slots if slot.key == key), None)
            if slot is None:
                return None
            with ArrayFile(self._blobs.open(blob_of(slot))) as file:
                return read(file)

        return read_again(read_slot)


def accuracy(source: PictureSource) -> figures.Section:
    """Draw the accuracy by round."""
    if not any(source.summary.curves.values()):
        silent = plot_devices.withheld(source.evaluated)
        raise SettingError(silent or "no device has reported an accuracy: none has a test part")
    return plot_accuracy.curves(source.summary)


def clients(source: PictureSource) -> figures.Section:
    """Draw the models of every device, sorted by the gain by federation."""
    if unknown := plot_devices.unknown(source.summary, source.evaluated):
        raise SettingError(unknown)
    return plot_devices.clients(source.summary)


def attention(source: PictureSource) -> figures.Section:
    """Draw which client learns from which."""
    kept = source.tensors(stored.MATRICES, stored.read_matrices)
    if kept is None:
        raise SettingError(
            f"{source.summary.method} stores no matrices of which client learns from which; "
            "fedmcsa, fedamp and their relatives do, from the first round on that this version closes"
        )
    names, matrices = kept
    if not matrices:
        raise SettingError(f"the matrices of {len(names)} clients were too large to be stored")
    return plot_clients.attention(matrices, names, source.groups, f"round {source.closed} of {source.summary.method}")


def embeddings(source: PictureSource) -> figures.Section:
    """Draw a map of the clients' embeddings."""
    kept = source.tensors(stored.NETWORK, stored.read_embeddings)
    if kept is None:
        raise SettingError(f"{source.summary.method} has no embeddings of clients; fedtp, pfedhn and their relatives have")
    names, z_NE = kept
    return plot_clients.embeddings(z_NE, names, source.groups)


def matrix(source: PictureSource) -> figures.Section:
    """Draw how each site's network scores at each other site."""
    section = seams.matrix_section(source.rows, source.task, drawn=True)
    if section is None:
        raise SettingError("no site has scored networks of others; `fedserver evaluate --matrix` lets them")
    return section


PICTURES: dict[str, Callable[[PictureSource], figures.Section]] = {
    "clients": clients,
    "accuracy": accuracy,
    "attention": attention,
    "embeddings": embeddings,
    "matrix": matrix,
}


def plot_home(home: ServerHome, out: Path, wanted: Sequence[str], formats: Sequence[Format] = ("png",)) -> list[str]:
    """Write pictures and a page into `out`; return a line for each file, and for each picture that is left out.

    Without `wanted`, all pictures are drawn that are possible.

    Raises:
        NoModel: No round is closed yet.
        SettingError: A wanted picture is not possible.
    """
    title, sections, left_out = pages(PictureSource.of_home(home), wanted)
    return [*map(str, figures.write(out, title, sections, formats)), *left_out]


def pictures_of(snapshot: Snapshot, blobs: Blobs, wanted: Sequence[str]) -> tuple[str, list[figures.Section]]:
    """Return the title and the sections of a simulation's pictures; errors as for `plot_home`."""
    return pages(PictureSource(lambda: snapshot, blobs, "this simulation"), wanted)[:2]


def pages(source: PictureSource, wanted: Sequence[str]) -> tuple[str, list[figures.Section], list[str]]:
    """Return the title, the sections of the page, and a line for each picture that is left out; errors as for `plot_home`.

    The first section is for readers without technical knowledge: one sentence, the picture of the devices, and one table.
    """
    sections, left_out = figures.drawn(PICTURES, source, wanted)
    summary, result = source.summary, plot_devices.helped(source.summary, source.evaluated)
    for at, section in enumerate(sections):
        if section.title == plot_devices.DEVICES:
            result, sections[at] = replace(result, picture=section.picture), replace(section, picture=None)
    title = f"{summary.method} with {summary.model}: {summary.closed} of {summary.rounds} rounds"
    table = [plot_accuracy.figures_of(summary)] if summary.latest else []
    return title, [result, *sections, *table], left_out


def by_classes(labels: Mapping[str, str]) -> dict[str, str]:
    """Group clients by the classes that they declared; empty if all have the same, or each has different ones."""
    kinds = set(labels.values())
    return dict(labels) if 1 < len(kinds) < len(labels) else {}
