"""Options that `fedclient` and `fedserver simulate` share: about tables, and what to compare with. They import little."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attune.common.task import TASKS

if TYPE_CHECKING:
    from attune.fedclient.read_options import ReadOptions

F = TypeVar("F", bound=Callable[..., Any])

EXECUTOR = click.Choice(["sequential", "stacked", "processes", "ray"])  # of fedclient.work.executor, which imports more
baseline_option = click.option(
    "--baseline", type=click.Choice(["alone", "local", "alone+local", "none"]),
    help="Compare what is kept with ordinary models of scikit-learn, fitted on this device alone, and with a network trained "
    "alone.  [default: alone]",
)  # fmt: skip


_MAPPING = (
    click.option(
        "--map", multiple=True, metavar="THEIRS=OURS",
        help="Of a table: a column's name here and in the federation, or values: COLUMN:THEIRS=OURS,THEIRS=OURS.",
    ),
    click.option(
        "--decimal", type=click.Choice(["point", "comma"]), default="point",
        help="Of a table: what stands before a fraction.  [default: point]",
    ),
)  # fmt: skip
_TABLE = (
    click.option(
        "--label", default="", metavar="NAME", help="Of a table (.csv, .parquet): the classes' column; A,B for more outputs."
    ),
    click.option("--columns", default="", metavar="A,B", help="Of a table: its features, in order.  [default: all others]"),
    click.option("--apart", multiple=True, metavar="NAME", help="Of a table: a column that is not a feature."),
    click.option("--split", default="", metavar="NAME", help="Of a table: the column that says train or test."),
    click.option("--group", default="", metavar="NAME", help="Of a table: what is alike there is held out together."),
    click.option("--key", default="", metavar="NAME", help="Of a table: tells rows apart. The same ones stay held out."),
    click.option("--missing", default="refuse", metavar="HOW", help="Refuse missing values, or median of the column."),
    click.option(
        "--missing-words", default="", metavar="A,B",
        help="All words that mean a missing value; `usual` stands for NA, nan, None, ?, - and such.  [default: usual]",
    ),
    click.option(
        "--standardise", type=click.Choice(["device", "federation", "none"]),
        help="Scale series and tables by this device's numbers, or by all devices' (with --disclose statistics).  "
        "[default: device]",
    ),
    click.option(
        "--schema", default="", metavar="FILE",
        help="Of a table: what its columns are (JSON or TOML); auto: all sites' tables make it; none.",
    ),
    click.option(
        "--task", type=click.Choice(list(TASKS)), default="classes", show_default=True,
        help="What is to be predicted: a class, numbers, several labels that are 0 or 1, or survival (--label TIME,EVENT).",
    ),
)  # fmt: skip


def mapping_options(command: F) -> F:
    """Add the options that map a site's table to the words of its federation."""
    return reduce(lambda whole, option: option(whole), reversed(_MAPPING), command)


def table_options(command: F) -> F:
    """Add the options about a table, and the task, to a command."""
    return reduce(lambda whole, option: option(whole), reversed((*_TABLE, *_MAPPING)), command)


# The names of these options in ReadOptions.of
NAMES = [option.name for option in click.command(table_options(lambda: None)).params if option.name]


def read_options(given: Mapping[str, Any]) -> ReadOptions:
    """Return the options that `table_options` collected.

    Raises:
        SettingError: An option is wrong.
    """
    from attune.fedclient.read_options import ReadOptions

    return ReadOptions.of(**{name: given[name] for name in NAMES})
