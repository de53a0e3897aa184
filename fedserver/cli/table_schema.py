"""`fedserver schema`: one schema of the proposals that sites have made with `fedclient describe`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from attune.common.outputs import check_file

if TYPE_CHECKING:
    from attune.fedserver.surveys.fleet_statistics import FleetStatistics

MOST_BYTES = 64 << 20  # of a file with statistics


@click.command()
@click.argument("proposals", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--edit", type=click.Path(path_type=Path, dir_okay=False), metavar="TOML",
    help="Sections [data.columns.NAME], which win over the proposals.",
)  # fmt: skip
@click.option(
    "--columns", type=click.Choice(["all", "common"]), default="all", show_default=True,
    help="A column that a site lacks is filled there like missing values, or left out for all (common).",
)  # fmt: skip
@click.option(
    "--ranges", type=click.Path(path_type=Path, dir_okay=False), metavar="JSON",
    help="Output of `fedserver statistics --json`: ranges of numbers over at least 5 devices, with which units are compared.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="A .json for `fedclient --schema`, or a .toml for `fedserver --config`.  [default: print the TOML]",
)  # fmt: skip
def schema(
    proposals: Sequence[Path], edit: Path | None, columns: Literal["all", "common"], ranges: Path | None, out: Path | None
) -> None:
    """Merge sites' proposals into one schema. The exit code is 2 if they contradict each other."""
    from attune.common.schema_file import read_columns, read_schema, write_schema
    from attune.common.text import clean
    from attune.fedserver.core.table_schemas import merge_proposals, telling, with_ranges

    if out is not None:
        check_file(out)
    edits = {} if edit is None else read_columns(edit)
    read = {name: read_schema(path) for name, path in zip(_names(proposals), proposals, strict=True)}
    merged = merge_proposals(read, edits, columns == "common")
    for name, texts in telling(merged, read).items():
        for text in texts:
            click.echo(f"warning: {clean(f'{name}: {text}')}", err=True)
    if ranges is not None:
        merged = with_ranges(merged, _statistics(ranges))
    if out is None:
        click.echo(merged.to_toml(), nl=False)
        return
    write_schema(out, merged)
    for name, why in merged.left_out.items():
        click.echo(f"left out: {name} ({why})")
    click.echo(f"{out}: {len(merged.feature_names)} features of {len(merged.used)} columns, {merged.digest[:15]} (digest)")


def _statistics(path: Path) -> FleetStatistics:
    """Read what `fedserver statistics --json` has printed.

    Raises:
        SettingError: The file cannot be read, or holds something else.
    """
    import msgspec

    from attune.common.durable import read_small
    from attune.common.errors import SettingError
    from attune.common.text import from_json
    from attune.fedserver.surveys.fleet_statistics import FleetStatistics

    try:
        return from_json(read_small(path, MOST_BYTES), FleetStatistics)
    except (OSError, msgspec.DecodeError) as error:
        raise SettingError(f"{path} holds no statistics of a fleet: {error}") from None


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each file: its own without the suffix, or the whole path where two are alike."""
    stems = [path.stem for path in paths]
    return [stem if stems.count(stem) == 1 else str(path) for stem, path in zip(stems, paths, strict=True)]
