"""A group of commands to which installed packages attach further ones."""

from __future__ import annotations

import unicodedata
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from attune.common.durable import open_streams

PATH = click.Path(path_type=Path)
FILE, FOLDER = click.Path(path_type=Path, dir_okay=False), click.Path(path_type=Path, file_okay=False)
FORMAT = click.option(
    "--format", "formats", multiple=True, default=("png",), show_default=True, type=click.Choice(["png", "pdf", "svg"]),
    help="Form of the pictures (may be repeated). The page has PNG in any case.",
)  # fmt: skip


class RoundsType(click.IntRange):
    """Number of rounds, or `auto` (fedserver.core.training_length)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else super().convert(value, param, ctx)


class NameType(click.types.StringParamType):
    """Name of a device, a run or a person, in the Unicode form that names have: some keyboards compose letters otherwise."""

    name = "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return unicodedata.normalize("NFC", super().convert(value, param, ctx))


NAME = NameType()


class ExtensibleGroup(click.Group):
    """The group's own commands, and those that entry points of the group `entry_point_group` name.

    So the spine offers commands of packages that it does not import. The group's own command wins if both have one name.
    """

    entry_point_group: str

    def main(self, *args: Any, **extra: Any) -> Any:
        open_streams()
        return super().main(*args, **extra)

    def list_commands(self, ctx: click.Context) -> list[str]:
        attached = (entry_point.name for entry_point in entry_points(group=self.entry_point_group))
        return sorted({*super().list_commands(ctx), *attached})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or next(
            (entry_point.load() for entry_point in entry_points(group=self.entry_point_group, name=cmd_name)), None
        )
