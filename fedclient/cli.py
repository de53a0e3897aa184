"""The command `fedclient`."""

from __future__ import annotations

import difflib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attune.common import aio
from attune.common.errors import AttuneError, SettingError
from attune.fedclient.command_options import (
    data_option,
    home_of,
    home_option,
    name_option,
    reported,
    server_option,
    timeout_option,
    token_file_option,
    token_in,
)
from attune.fedclient.table_options import NAMES, read_options, table_options

if TYPE_CHECKING:
    from attune.fedclient.console import Console
    from attune.fedclient.fleet import How
    from attune.fedclient.model.artifact import ModelInfo
    from attune.fedclient.options import Options
    from attune.fedclient.read_options import ReadOptions
    from attune.fedclient.thrift import Thrift

# gRPC's core prints to stderr on its own; it reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

BESIDE = ("doctor", "export", "serve")  # commands of fedclient.commands


class Group(click.Group):
    """The main command is the group itself; an unknown word or option is answered with the nearest known one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *BESIDE])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BESIDE:
            return super().get_command(ctx, cmd_name)
        from attune.fedclient import commands

        command: click.Command = getattr(commands, cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            if Path(args[0]).exists():
                raise click.UsageError(
                    f"{args[0]!r} is one path too many: put a pattern in quotes, as in --data 'shards/*'.", ctx
                )
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(self.list_commands(ctx))}."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@data_option(
    "A folder with train.npz [, test.npz], one .npz or a table. A quoted pattern ('shards/*') hosts a device for each."
)
@server_option()
@table_options
@home_option
@name_option
@click.option("--token", help="A join token, if this device is not enrolled yet.")
@token_file_option
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads for training.")
@timeout_option
@click.option(
    "--keep", type=click.Choice(["best", "personalized"]), default="best", show_default=True,
    help="best: a blend of the models, weighted on samples held out of training; personalized: the own model alone.",
)  # fmt: skip
@click.option("--baseline", type=click.Choice(["local"]), help="Also train a model on this device alone, for comparison.")
@click.option(
    "--executor", type=click.Choice(["sequential", "stacked", "auto", "processes", "ray"]), default="sequential",
    show_default=True,
    help="Of several shards: one device after the other; all that have an order side by side; what of these a trial finds "
    "faster; or spread over a process for each processor, or over the workers of a Ray cluster.",
)  # fmt: skip
@click.option(
    "--allow-model", multiple=True, metavar="MODULE:FACTORY", help="Model code of the federation that may run on this device."
)
@click.option("--max-epochs", type=click.IntRange(1), default=1000, show_default=True, help="That one order may train for.")
@click.option(
    "--max-model-bytes", type=click.IntRange(1), default=4 << 30, show_default=True, help="Of the model that the server names."
)
@click.option(
    "--max-order", type=click.FloatRange(1), default=86_400, show_default=True, metavar="S",
    help="Give an order up after so many seconds, whatever the server says.",
)  # fmt: skip
@click.option(
    "--max-orders", type=click.IntRange(1), default=100_000, show_default=True, help="That this device carries out in all."
)
@click.option("--nice", type=click.IntRange(0, 19), default=0, help="Lower this process's priority by so much.")
@click.option("--max-memory", type=click.IntRange(1 << 28), metavar="BYTES", help="Of this process's own memory.")
@click.option("--max-disk", type=click.IntRange(1), metavar="BYTES", help="Of this device's home.")
@click.option("--max-rate", type=click.FloatRange(1024), metavar="BYTES", help="To and from the server, in a second.")
@click.option(
    "--only-when", multiple=True, type=click.Choice(["idle", "charging"]), help="Train only then (may be given twice)."
)
@click.option("--stay", is_flag=True, help="After the last round wait for the federation's next run.")
@click.option(
    "--hooks", metavar="MODULE", help="Module with this device's own train(model, data, context), evaluate(model, data)."
)
@click.version_option(package_name="attune-fl")
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    """Train on this device's data and end with a model of its own.

    \b
    fedclient --data shard3 --server localhost:50051
    fedclient --data 'shards/*' --server localhost:50051
    """
    if ctx.invoked_subcommand is not None:
        return
    if not given["data"] or given["server"] is None:
        raise click.UsageError("Missing option '--data' or '--server'. Try: fedclient --data SHARD --server HOST:PORT", ctx)
    with reported():
        _train(given)


def _train(given: dict[str, Any]) -> None:
    from attune.fedclient import shards
    from attune.fedclient.client import Client
    from attune.fedclient.console import console
    from attune.fedclient.hooks import NONE, Hooks
    from attune.fedclient.limits import Limits

    first, hooks = Path(given["data"][0]), Hooks.of_module(given["hooks"]) if given["hooks"] else NONE
    client = Client(
        data=first,
        server=given["server"],
        model=given["allow_model"],
        home=given["home"],
        name=given["name"],
        token=token_in(given["token"], given["token_file"]),
        device=given["device"],
        threads=given["threads"],
        connect_timeout_s=given["connect_timeout"],
        keep=given["keep"],
        baseline=given["baseline"],
        limits=Limits(given["max_epochs"], given["max_model_bytes"], given["max_order"], given["max_orders"]),
        stay=given["stay"],
        thrift=_thrift(given),
        train=hooks.train,
        evaluate=hooks.evaluate,
        label=given["label"],
        table={name: given[name] for name in NAMES if name != "label"},
    )
    fleet = shards.members(shards.expand(given["data"]), client.options) if shards.is_fleet(given["data"]) else None
    screen = console()

    def leave(signum: int, frame: object) -> None:
        # State on disk is safe at every moment, so this waits for nothing: not for the current batch, not for the network.
        screen.close()
        sys.stdout.flush()
        os.write(2, b"fedclient: stopped; finished work is saved, start again to continue\n")
        os._exit(128 + signum)

    client.options.thrift.apply()
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, leave)
    try:
        if fleet is None:
            client.take_part(screen)
        else:
            _train_fleet(fleet, screen, given["executor"])
    finally:
        screen.close()


def _thrift(given: dict[str, Any]) -> Thrift:
    from attune.fedclient.thrift import Thrift

    return Thrift(
        given["nice"], given["max_memory"] or 0, given["max_disk"] or 0, given["max_rate"] or 0.0, tuple(given["only_when"])
    )


def _train_fleet(fleet: list[Options], screen: Console, executor: How) -> None:
    from attune.fedclient import fleet as hosted

    outcomes = hosted.run(fleet, screen, executor)
    screen.close()
    for line in hosted.table(outcomes):
        click.echo(line)
    for line in hosted.failures(outcomes):
        click.echo(f"fedclient: {line}", err=True)
    sys.exit(hosted.exit_code(outcomes))


@main.command()
@server_option(required=True)
@click.option("--token", help="What `fedserver token` printed.")
@token_file_option
@data_option(
    "Enrol a device for each of these shards, each by a use of the token. Default: one device, for the first that starts."
)
@name_option
@home_option
@timeout_option
def join(
    server: str,
    token: str | None,
    token_file: str | None,
    data: tuple[str, ...],
    name: str | None,
    home: Path | None,
    connect_timeout: float,
) -> None:
    """Enrol this device with a server, once."""
    with reported():
        token = token_in(token, token_file)
        if token is None:
            raise click.UsageError("Missing option '--token' or '--token-file'.")
        if data:
            from attune.fedclient import fleet

            fleet.join(_members(data, server, home, name, token, connect_timeout), click.echo)
            return
        from attune.common import homes
        from attune.common.identity.names import default_name
        from attune.fedclient.address import Address
        from attune.fedclient.home import DeviceInfo, Home, check_name
        from attune.fedclient.link.enrol import enrol, stay_enrolled

        address = Address.parse(server)
        where = Home(home or homes.joined_home(address.host, address.port))
        record = DeviceInfo(name or default_name(socket.gethostname(), ""), str(address))
        with where.locked():
            identity = where.identity()
            if identity is not None:
                check_name(where, name, identity)
                aio.run(stay_enrolled(where, identity, address, token, connect_timeout, click.echo))
                return
            identity = aio.run(enrol(where, record, address, token, connect_timeout, click.echo))
        click.echo(f"enrolled as {identity.name}; now: fedclient --data SHARD --server {address}")


@main.command()
@data_option("The shard whose device is meant; a quoted pattern checks the home of each.")
@server_option()
@home_option
def verify(data: tuple[str, ...], server: str | None, home: Path | None) -> None:
    """Hold every file of this device's home against its digest; exit code 4 if one is damaged."""
    with reported():
        from attune.common.errors import HomeMismatch
        from attune.fedclient.verify import damages, meant

        found = [(place, list(damages(place))) for place in meant(home, server, data)]
        for place, lines in found:
            for line in lines or [f"{place.path} is whole"]:
                click.echo(line)
        sys.exit(HomeMismatch.exit_code if any(lines for _, lines in found) else 0)


@main.command()
@data_option("Its test part is used. A quoted pattern evaluates each shard's own model.", required=True)
@server_option()
@home_option
@table_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def evaluate(data: tuple[str, ...], server: str | None, home: Path | None, as_json: bool, **given: Any) -> None:
    """The finished model's accuracy on a shard's test part, offline."""
    with reported():
        table = read_options(given)
        from attune.fedclient import shards
        from attune.fedclient.model import evaluate as evaluation

        if shards.is_fleet(data):
            sys.exit(_evaluate_fleet(data, server, home, as_json, table))
        found = evaluation.of(home_of(home, server, Path(data[0])), Path(data[0]), table)
        click.echo(json.dumps(asdict(found)) if as_json else found)


def _evaluate_fleet(data: tuple[str, ...], server: str | None, home: Path | None, as_json: bool, table: ReadOptions) -> int:
    """One line for each shard with its accuracy or the reason why there is none, then the mean; returns the exit code."""
    from attune.fedclient import shards
    from attune.fedclient.model import evaluate as evaluation

    paths = shards.expand(data)
    labels = shards.labels(paths)
    found, code = [], 0
    for path, label in zip(paths, labels, strict=True):
        try:
            found.append(evaluation.of(home_of(home / label if home else None, server, path, only_own=True), path, table))
        except AttuneError as error:
            click.echo(f"fedclient: {label}: {error}", err=True)
            code = code or error.exit_code
            continue
        if not as_json:
            click.echo(found[-1])
    if found and as_json:
        click.echo(json.dumps({"clients": [asdict(each) for each in found]} | evaluation.means(found)))
    elif found:
        mean = evaluation.means(found)
        over_samples = f"{mean['over_samples']:.4f} over all test samples"
        click.echo(f"mean of {len(found)} clients: {found[0].metric} {mean['accuracy']:.4f} ({over_samples})")
    return code


@main.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, metavar="NEW", help="An .npz with x, or a table.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="A CSV file: index, label; index, position, label for labels of positions; index, A, B for targets or labels A and B.",
)
@server_option()
@home_option
def predict(data: Path, out: Path, server: str | None, home: Path | None) -> None:
    """Label new samples with the finished model, offline."""
    with reported():
        import csv

        from attune.fedclient.data.shard import load_features
        from attune.fedclient.model.artifact import Model

        model = Model.load(home_of(home, server, None).model)

        labels = model.predict(load_features(data, model.info.column_names), str(data))
        try:
            with out.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(_label_rows(labels, model.info))
        except OSError as error:
            raise SettingError(f"cannot write {out}: {error.strerror}") from None
        what = "labelled sequences" if model.info.model.per_position else "labels" if model.info.task == "classes" else "rows"
        click.echo(f"{len(labels)} {what} in {out}")


def _label_rows(labels: Sequence[Any], info: ModelInfo) -> Iterator[tuple[Any, ...]]:
    """A heading, then a row for each sample, or for each position of each sample."""
    if info.task != "classes":
        yield "index", *(str(name) for name in info.classes)
        yield from ((index, *(row if isinstance(row, list) else [row])) for index, row in enumerate(labels))
        return
    if not info.model.per_position:
        yield "index", "label"
        yield from enumerate(labels)
        return
    yield "index", "position", "label"
    for index, row in enumerate(labels):
        yield from ((index, position, label) for position, label in enumerate(row))


@main.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, metavar="SHARD", help="Its test part is drawn.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to write to.")
@click.option(
    "--model", "models", type=click.Path(path_type=Path), multiple=True, metavar="DIR",
    help="A finished model's folder, or a device's home (repeat to compare; default: this shard's).",
)  # fmt: skip
@click.option(
    "--picture", "pictures", multiple=True, type=click.Choice(["rollout", "confusion", "classes", "labels", "predicted"]),
    help="Only this one (may be repeated; default: all that the model has).",
)  # fmt: skip
@click.option("--images", type=click.IntRange(1, 20), default=6, show_default=True, help="Test images to show the rollout on.")
@server_option()
@home_option
def plot(
    data: Path,
    out: Path,
    models: tuple[Path, ...],
    pictures: tuple[str, ...],
    images: int,
    server: str | None,
    home: Path | None,
) -> None:
    """Pictures of what models answer on a shard's test part, offline."""
    with reported():
        if models and (server or home):
            raise click.UsageError("--model names the models: leave --home and --server out")
        folders = models or (home_of(home, server, data).model,)
        from attune.fedclient.model import plots

        for line in plots.plot(folders, data, out, images, pictures):
            click.echo(line)


@main.command()
@click.argument("source", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the shard.")
@table_options
@click.option("--text", default="", metavar="NAME", help="The column with text, where samples are text with a class.")
@click.option("--length", type=click.IntRange(1), default=128, show_default=True, help="Characters (or tokens) of a text.")
@click.option(
    "--tokenizer",
    default="",
    metavar="PLACE",
    help="What makes tokens of text: a tokenizer.json or its folder, PATH or PACKAGE:PATH.  [default: characters]",
)
@click.option("--size", default="", metavar="HxW", help="Pixels to which all images are brought.  [default: as they are]")
@click.option("--grey", is_flag=True, help="Images with one channel instead of three.")
@click.option("--classes", default="", metavar="A,B", help="All classes that any device of the federation may have.")
def shard(
    source: Path, out: Path, text: str, length: int, tokenizer: str, size: str, grey: bool, classes: str, **given: Any
) -> None:
    """Make a shard of FILE: a table (.csv, .parquet), a folder of images, a text, or a Hugging Face dataset on disk."""
    with reported():
        from attune.fedclient.data.makers.make import make
        from attune.fedclient.data.makers.options import MakeOptions

        made = make(source, MakeOptions.of(read_options(given), text, length, size, grey, classes, tokenizer), out)
        for warning in made.warnings:
            click.echo(f"warning: {warning}")
        click.echo(f"{out}: {made.described}")
        click.echo(f"now: fedclient --data {out} --server HOST:PORT")


@main.command()
@click.option("--dataset", metavar="digits|PATH", help="The bundled digits, or files of your own: docs/data.md has the forms.")
@click.option("--scheme", required=True, metavar="SCHEME", help="How to cut: iid, pathological, dirichlet, ... (docs/data.md).")
@click.option("--clients", type=int, help="How many shards, unless the scheme or the data fix it.")
@click.option("--classes-per-client", type=int, help="pathological, two-class-unequal: classes of each.  [default: 2]")
@click.option("--alpha", type=float, help="dirichlet, pachinko: smaller is more unequal [default: 0.3]; synthetic [0.5].")
@click.option("--by", metavar="NAME", help="natural: the column or array that names the client.")
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any other setting of the scheme.")
@click.option(
    "--label", default="", metavar="NAME", help="The column or array with the classes; NAME>NUMBER makes two classes."
)
@click.option("--apart", multiple=True, metavar="NAME", help="A column of a table that is not a feature.")
@click.option("--shape", default="", metavar="SIZES", help="Shape of one sample, such as 28x28, if the file has flat samples.")
@click.option("--missing", default="refuse", show_default=True, metavar="HOW", help="NaN: refuse, or median of the column.")
@click.option("--normalise", metavar="HOW", help="none, channel, pixel, cifar10 or cifar100.  [default: the scheme's]")
@click.option("--noise", type=float, default=0.0, metavar="SIGMA", help="Noise that rises from 0 for the first client to this.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the shards.")
def partition(classes_per_client: int | None, alpha: float | None, by: str | None, **given: Any) -> None:
    """Cut a data set into shards, for experiments."""
    with reported():
        from attune.fedclient.partition import command as partitioning

        flags = {"classes_per_client": classes_per_client, "alpha": alpha, "by": by}
        request = partitioning.Request(flags=flags, **given)
        partitioning.run(request, click.echo, lambda text: click.echo(f"fedclient: {text}", err=True))


def _members(
    data: tuple[str, ...], server: str, home: Path | None, name: str | None, token: str, connect_timeout_s: float
) -> list[Options]:
    from attune.fedclient import shards
    from attune.fedclient.address import Address
    from attune.fedclient.options import Options

    common = Options(Path(data[0]), Address.parse(server), home, name, token=token, connect_timeout_s=connect_timeout_s)
    return shards.members(shards.expand(data), common)


if __name__ == "__main__":
    main()
