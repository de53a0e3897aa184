"""Command `fedserver new`."""

from __future__ import annotations

from pathlib import Path

import click

from attune.common.command_group import PATH
from attune.common.errors import SettingError

PROJECT = Path(__file__).parent / "project"


@click.command()
@click.argument("folder", type=PATH)
def new(folder: Path) -> None:
    """Write a small project to edit into FOLDER: data, model, training, settings; it runs at once."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already and is not empty; nothing was written: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("README.md", "run.py", "data.py", "model.py", "federation.toml"):  # in the order in which to read them
        (folder / name).write_bytes((PROJECT / name).read_bytes())
        click.echo(folder / name)
    click.echo(f"now: cd {folder}; python run.py")
