"""What a simulation came to: a row for each device, the status, the models, and files of all of it on request."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attune.common.errors import SettingError, nearest
from attune.fedclient.work.inline import Executor
from attune.fedclient.work.processes.pool import Pool
from attune.fedclient.work.together import SideBySide
from attune.fedserver.view.status import status
from attune.simulation.executor_names import SEQUENTIAL
from attune.simulation.federation import Ended
from attune.simulation.table import Row, Table, row_of
from attune.simulation.worlds import World

if TYPE_CHECKING:
    from attune.common.pictures.page import Section
    from attune.fedclient.model.artifact import Model


@dataclass(frozen=True)
class Pictures:
    """A page of pictures with their numbers."""

    title: str
    sections: Sequence[Section] = field(repr=False)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from attune.common.pictures import page

        return page.render(self.title, self.sections)

    def save(self, folder: str | Path) -> Path:
        """A PNG file for each picture, and index.html with all of them; the page's path."""
        from attune.common.pictures import page

        return page.write(Path(folder).expanduser(), self.title, self.sections)[-1]


class Result:
    """Of a federation that is over."""

    def __init__(self, ended: Ended, world: World, executor: Executor | Pool | None = None) -> None:
        self._ended, self._world, self._executor = ended, world, executor

    def __repr__(self) -> str:
        found = self.status
        return f"<Result of {found['method']}, {found['round']} rounds, {len(found['clients'])} devices>"

    @cached_property
    def status(self) -> dict[str, Any]:
        """The object that `fedserver status --json` prints of such a federation."""
        return status(self._ended.found, set(self._ended.reported), None, self._ended.troubles)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The object that `fedserver export` writes as summary.json: accuracies by the protocols of both papers, curves."""
        from attune.fedserver.view.export import summarised

        assert self._ended.found.plan is not None  # noqa: S101 (it is over, so it had one)
        return dict(msgspec.to_builtins(summarised(self._ended.found, self._ended.found.plan)))

    def table(self) -> Table:
        """A row for each device: its accuracies, and whether its own model is better than the others."""
        return Table([row_of(name, result) for name, result in sorted(self._ended.results.items())])

    def model(self, name: str) -> Model:
        """The finished model of a device. Errors: SettingError if there is no such device."""
        if name not in self._ended.results:
            raise SettingError(f"there is no device {name!r}{nearest(name, self._ended.results)}")
        return self._world.model(name)

    def plot(self, *pictures: str) -> Pictures:
        """The pictures of `fedserver plot`: those named, or all that there can be. A notebook shows them; `save` writes them.

        Errors: SettingError for a picture that cannot be.
        """
        from attune.fedserver.view import plots

        source = plots.PictureSource(lambda: self._ended.found, self._world.storage.blobs, None, "this simulation")
        title, sections, _ = plots.pages(source, pictures)
        return Pictures(title, sections)

    @property
    def executor(self) -> str:
        """How cohorts were carried out: "sequential", "stacked", "processes", "auto" where no trial was needed, or a class."""
        if self._executor is None:
            return SEQUENTIAL
        if isinstance(self._executor, Pool):
            return self._executor.name
        return self._executor.how if isinstance(self._executor, SideBySide) else type(self._executor).__name__

    @property
    def one_by_one(self) -> list[str]:
        """Why devices that are stacked did some things one by one, each reason once."""
        return self._executor.reasons if isinstance(self._executor, SideBySide) else []

    @property
    def digests(self) -> dict[str, str]:
        """Of every piece of the server's state, by part and key: equal digests are equal bits."""
        return {f"{slot.part}/{slot.key}": slot.digest for slot in self._ended.found.slots}

    @property
    def bytes_moved(self) -> int:
        """What all devices together sent and received of models, over all rounds."""
        return sum((row.bytes_up or 0) + (row.bytes_down or 0) for row in self._ended.found.rows)

    def save(self, folder: str | Path) -> Path:
        """What `fedserver export` writes, with table.csv, status.json and every device's finished model in models/NAME.

        Errors: DiskFull.
        """
        from attune.fedclient.model.artifact import save
        from attune.fedserver.view import export

        out, found = Path(folder).expanduser(), self._ended.found
        assert found.plan is not None  # noqa: S101 (it is over, so it had one)
        (out / "models").mkdir(parents=True, exist_ok=True)
        export.write_state(found, self._world.storage.blobs, out)
        export.write_tables(found, found.plan, out, self._ended.reported, self._ended.troubles)
        with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [each.name for each in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in self.table())
        for name in self._ended.results:
            model = self.model(name)
            save(out / "models" / name, model.info, {kind: member.tensors for kind, member in model.members.items()})
        return out
