"""`fedclient partition`: cut a data set into shards on disk, with a picture and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from attune.common.command_group import FOLDER
from attune.common.config import parse_assignment
from attune.common.durable import check_folder
from attune.common.errors import SettingError
from attune.fedclient.table_options import mapping_options
from attune.simulation.partition.schemes import registry

_IGNORED_WHERE_UNKNOWN = ("classes_per_client", "alpha")  # flags that were never refused where they have no effect


@click.command()
@click.option("--dataset", metavar="digits|PATH", help="The bundled digits, or files of your own: docs/data.md has the forms.")
@click.option("--scheme", required=True, metavar="SCHEME", help="How to cut: iid, pathological, dirichlet, ... (docs/data.md).")
@click.option("--clients", type=int, help="How many shards, unless the scheme or the data fix it.")
@click.option("--classes-per-client", type=int, help="pathological, two-class-unequal: classes of each.  [default: 2]")
@click.option("--alpha", type=float, help="dirichlet, pachinko: smaller is more unequal [0.3]; synthetic: no effect, E8 [0.5].")
@click.option("--by", metavar="NAME", help="natural: the column or array that names the client.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any other setting of the scheme.")
@click.option(
    "--label", default="", metavar="NAME", help="The column or array with the classes; NAME>NUMBER makes two classes."
)
@click.option("--apart", multiple=True, metavar="NAME", help="A column of a table that is not a feature.")
@click.option("--key", default="", metavar="NAME", help="A column of a table that tells rows apart. It is not a feature.")
@click.option("--shape", default="", metavar="SIZES", help="Shape of one sample, such as 28x28, if the file has flat samples.")
@click.option("--missing", default="refuse", show_default=True, metavar="HOW", help="NaN: refuse, or median of the column.")
@click.option("--missing-words", default="", metavar="A,B", help="All words that mean a missing value.  [default: usual]")
@mapping_options
@click.option("--normalise", metavar="HOW", help="none, channel, pixel, cifar10 or cifar100.  [default: the scheme's]")
@click.option("--noise", type=float, default=0.0, metavar="SIGMA", help="Noise that rises from 0 for the first client to this.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=FOLDER, required=True, help="Folder for the shards.")
def partition(
    dataset: str | None,
    scheme: str,
    clients: int | None,
    assignments: tuple[str, ...],
    normalise: str | None,
    noise: float,
    seed: int,
    out: Path,
    **given: Any,
) -> None:
    """Cut a data set into shards, for experiments."""
    settings = _settings(scheme, assignments, {name: given.pop(name) for name in ("classes_per_client", "alpha", "by")})
    from attune.fedclient.data import findings
    from attune.fedclient.read_options import ReadOptions
    from attune.simulation.partition import split
    from attune.simulation.partition.datasets import load_source
    from attune.simulation.partition.split import save_picture, table

    source = None
    check_folder(out)
    if dataset is not None:
        named = [settings[key] for key in ("by", "group") if settings.get(key)]
        apart = (*given.pop("apart"), *map(str, named))
        source = load_source(dataset, seed, ReadOptions.of(apart=apart, **given))
    made = split.partition(source, scheme, clients, seed, normalise=normalise, noise=noise, **settings)
    split.write_shards(out, made)
    click.echo(table(made))
    findings.show({"": made.dataset.findings})
    for note in made.notes:
        click.echo(f"note: {note}")
    save_picture(made, out / "partition.png")
    click.echo(f"shards in {out}, picture in {out / 'partition.png'}")


def _settings(scheme: str, assignments: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scheme's settings: those of --set, then those of flags.

    Raises:
        SettingError: for a setting that the scheme does not have.
    """
    known = registry.fields(registry.get(scheme))
    settings: dict[str, Any] = {}
    for text in assignments:
        path, value = parse_assignment(text)
        if len(path) != 1:
            raise SettingError(f"--set takes KEY=VALUE here, with a setting of scheme {scheme}, not {text!r}")
        settings[path[0]] = value
    for key, value in flags.items():
        if value is None:
            continue
        if key in _IGNORED_WHERE_UNKNOWN and key not in known:
            click.echo(f"fedclient: scheme {scheme} has no --{key.replace('_', '-')}; it is ignored", err=True)
            continue
        settings[key] = value
    return settings
