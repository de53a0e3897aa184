"""Options of several commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
HOME = click.option("--home", type=click.Path(path_type=Path), default=None, help="The folder of the server's state.")


def SETTINGS(command: F) -> F:  # noqa: N802 - used as the other options are
    """Options that say what a run is."""
    options = (
        click.option("--config", type=click.Path(path_type=Path), help="A federation.toml."),
        click.option("--method", help="fedtp, fedmcsa, fedavg, ... (default fedtp)."),
        click.option("--model", help="vit, transformer, dnn, mlr, or package.module:factory (default: by the kind of data)."),
        click.option("--rounds", type=click.IntRange(1), help="Rounds to train (default 40)."),
        click.option("--min-clients", type=click.IntRange(1), help="Devices needed before a round starts (default 2)."),
        click.option(
            "--clients-per-round", type=click.IntRange(1), help="Devices sampled for a round (default: all connected)."
        ),
        click.option("--seed", type=int, help="Seed of every random draw (default 0)."),
        click.option("--set", "assignments", multiple=True, metavar="A.B=C", help="Any setting, such as method.sigma=50."),
    )
    for option in reversed(options):
        command = option(command)
    return command
