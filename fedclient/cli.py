"""The command `fedclient`."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from common.errors import AttuneError, DiskFull, SettingError

# gRPC's core prints to stderr on its own; it reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

DEFAULT_TIMEOUT_S = 300.0
F = TypeVar("F", bound=Callable[..., Any])


class Group(click.Group):
    """The main command is the group itself; an unknown word or option is answered with the nearest known one."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(self.list_commands(ctx))}."
            raise click.UsageError(f"No such command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Errors for people: one line on stderr and the error's own exit code, never a traceback."""
    try:
        yield
    except AttuneError as error:
        click.echo(f"fedclient: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # whoever read our output has gone; click ends quietly
        click.echo(f"fedclient: {error.strerror}: {error.filename}", err=True)
        sys.exit(DiskFull.exit_code if error.errno in (errno.ENOSPC, errno.EDQUOT) else AttuneError.exit_code)
    except KeyboardInterrupt:
        click.echo("fedclient: interrupted; what was finished is kept", err=True)
        sys.exit(130)


def _server_option(required: bool = False) -> Callable[[F], F]:
    return click.option("--server", metavar="HOST:PORT", required=required, help="Where fedserver listens.")


_home_option = click.option(
    "--home", type=click.Path(path_type=Path, file_okay=False), help="This device's folder (default: one per server and shard)."
)
_name_option = click.option("--name", help="This device's name (default: HOSTNAME-SHARD).")
_timeout_option = click.option(
    "--connect-timeout", type=click.FloatRange(min=0), default=DEFAULT_TIMEOUT_S, show_default=True, metavar="S",
    help="Seconds without a word from the server after which to give up.",
)  # fmt: skip


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--data", type=click.Path(path_type=Path), metavar="SHARD", help="A folder with train.npz [, test.npz], or one .npz."
)
@_server_option()
@_home_option
@_name_option
@click.option("--token", help="A join token, if this device is not enrolled yet.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="CPU threads for training.")
@_timeout_option
@click.option("--allow-model", multiple=True, metavar="MODULE:FACTORY", help="Model code of the federation that may run here.")
@click.version_option(package_name="attune")
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    """Train on this device's data and end with a model of its own.

    \b
    fedclient --data shard3 --server localhost:50051
    """
    if ctx.invoked_subcommand is not None:
        return
    if given["data"] is None or given["server"] is None:
        raise click.UsageError("Missing option '--data' or '--server'. Try: fedclient --data SHARD --server HOST:PORT", ctx)
    with reported():
        _train(given)


def _train(given: dict[str, Any]) -> None:
    from fedclient import app
    from fedclient.address import Address
    from fedclient.options import Options
    from fedclient.report import reporter

    options = Options(
        data=given["data"],
        server=Address.parse(given["server"]),
        home=given["home"],
        name=given["name"],
        token=given["token"],
        device=given["device"],
        threads=given["threads"],
        connect_timeout_s=given["connect_timeout"],
        allow_models=tuple(given["allow_model"]),
    )
    screen = reporter()

    def leave(signum: int, frame: object) -> None:
        # State on disk is safe at every moment, so nothing is waited for: not the batch at hand, not the network.
        screen.close()
        sys.stdout.flush()
        os.write(2, b"fedclient: stopped; what was finished is kept, start again to go on\n")
        os._exit(128 + signum)

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, leave)
    try:
        app.run(options, screen)
    finally:
        screen.close()


@main.command()
@_server_option(required=True)
@click.option("--token", required=True, help="What `fedserver token` printed.")
@_name_option
@_home_option
@_timeout_option
def join(server: str, token: str, name: str | None, home: Path | None, connect_timeout: float) -> None:
    """Enrol this device with a server, once."""
    with reported():
        from common import homes
        from common.identity.names import default_name
        from fedclient.address import Address
        from fedclient.enrol import enrol
        from fedclient.home import Home, Record, check_name

        address = Address.parse(server)
        where = Home(home or homes.joined_home(address.host, address.port))
        record = Record(name or default_name(socket.gethostname(), ""), str(address))
        with where.locked():
            identity = where.identity()
            if identity is not None:
                check_name(where, name, identity)
                click.echo(f"already enrolled as {identity.name}; --token is ignored")
                return
            identity = asyncio.run(enrol(where, record, address, token, connect_timeout, click.echo))
        click.echo(f"enrolled as {identity.name}; now: fedclient --data SHARD --server {address}")


@main.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, metavar="SHARD", help="Its test part is used.")
@_server_option()
@_home_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def evaluate(data: Path, server: str | None, home: Path | None, as_json: bool) -> None:
    """The finished model's accuracy on a shard's test part, offline."""
    with reported():
        model = _model(home, server, data)
        from common.data.shard import load_shard

        accuracy, samples = model.evaluate(load_shard(data))
        info = model.info
        if as_json:
            said = {"name": info.name, "method": info.method, "accuracy": accuracy, "samples": samples, "round": info.round}
            click.echo(json.dumps(said))
        else:
            click.echo(f"{info.name} ({info.method}): accuracy {accuracy:.4f} on {samples} test samples")


@main.command()
@click.option("--data", type=click.Path(path_type=Path), required=True, metavar="NEW.NPZ", help="An .npz with x.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="A CSV file: index, label.")
@_server_option()
@_home_option
def predict(data: Path, out: Path, server: str | None, home: Path | None) -> None:
    """Label new samples with the finished model, offline."""
    with reported():
        import csv

        model = _model(home, server, None)
        from common.data.shard import load_features

        labels = model.predict(load_features(data), str(data))
        try:
            with out.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(("index", "label"))
                writer.writerows(enumerate(labels))
        except OSError as error:
            raise SettingError(f"cannot write {out}: {error.strerror}") from None
        click.echo(f"{len(labels)} labels in {out}")


@main.command()
@click.option("--dataset", required=True, metavar="digits|PATH", help="The bundled digits, or an .npz or folder of your own.")
@click.option("--scheme", required=True, metavar="SCHEME", help="iid, pathological or dirichlet.")
@click.option("--clients", type=int, required=True, help="How many shards.")
@click.option("--classes-per-client", type=int, default=2, show_default=True, help="pathological: classes of each.")
@click.option("--alpha", type=float, default=0.3, show_default=True, help="dirichlet: smaller is more unequal.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the shards.")
def partition(dataset: str, scheme: str, clients: int, classes_per_client: int, alpha: float, seed: int, out: Path) -> None:
    """Cut a data set into shards, for trying things out."""
    with reported():
        from common.data import partition as parts
        from common.data.datasets import load_dataset
        from common.data.picture import save_picture, table

        made = parts.partition(load_dataset(dataset, seed), scheme, clients, classes_per_client, alpha, seed)
        parts.write_shards(out, made)
        click.echo(table(made))
        save_picture(made, out / "partition.png")
        click.echo(f"shards in {out}, picture in {out / 'partition.png'}")


def _model(home: Path | None, server: str | None, shard: Path | None) -> Any:
    from fedclient.address import Address
    from fedclient.home import with_model

    found = with_model(home, Address.parse(server) if server else None, shard)
    from fedclient.artifact import Model

    return Model(found.model)


if __name__ == "__main__":
    main()
