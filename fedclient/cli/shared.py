"""Options that several commands of `fedclient` share, their meaning, and the report of errors."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attune.common import homes
from attune.common.command_group import FILE, FOLDER, NAME
from attune.common.durable import NO_SPACE
from attune.common.errors import AttuneError, DiskFull, SettingError, needing
from attune.fedclient.address import CONNECT_TIMEOUT_S

if TYPE_CHECKING:
    from attune.fedclient.home import DeviceHome

MAX_TOKEN_FILE = 4096  # characters; a token has 76
F = TypeVar("F", bound=Callable[..., Any])


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Report an error in one line on stderr and end with its exit code, without a traceback."""
    try:
        yield
    except (AttuneError, ModuleNotFoundError) as error:
        click.echo(f"fedclient: {needing(error)}", err=True)
        sys.exit(needing(error).exit_code)
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # the reader of our output has closed the pipe; click ends quietly
        click.echo(f"fedclient: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", err=True)
        sys.exit(DiskFull.exit_code if error.errno in NO_SPACE else AttuneError.exit_code)
    except RuntimeError as error:
        if not homes.is_homeless(error):
            raise
        click.echo(f"fedclient: {homes.HOMELESS}", err=True)
        sys.exit(SettingError.exit_code)
    except KeyboardInterrupt:
        click.echo("fedclient: interrupted; finished work is saved", err=True)
        sys.exit(130)


def server_option(required: bool = False) -> Callable[[F], F]:
    """Return the option --server."""
    return click.option("--server", metavar="HOST:PORT", required=required, help="Where fedserver listens.")


def data_option(help_text: str, **more: Any) -> Callable[[F], F]:
    """Return the option --data, which may be given several times."""
    return click.option("--data", metavar="SHARD", multiple=True, help=help_text, **more)


home_option = click.option(
    "--home",
    type=FOLDER,
    help="This device's folder (default: one per server and shard); for several devices, the folder that holds theirs.",
)
allow_model_option = click.option(
    "--allow-model", "allow_models", multiple=True, metavar="MODULE:FACTORY", help="Model code that may run on this device."
)
name_option = click.option(
    "--name", type=NAME, help="This device's name (default: device- and digits of its key); for several devices, NAME-SHARD."
)
timeout_option = click.option(
    "--connect-timeout", type=click.FloatRange(min=0), default=CONNECT_TIMEOUT_S, show_default=True, metavar="S",
    help="Give up after this many seconds without an answer from the server.",
)  # fmt: skip


def through_proxy(command: Callable[..., None]) -> Callable[..., None]:
    """Add --proxy and --proxy-credentials to a command that takes the proxy which they name."""

    @wraps(command)
    def called(*, proxy: str | None, proxy_credentials: Path | None, **given: Any) -> None:
        from attune.fedclient.address import Proxy

        command(proxy=Proxy.parse(proxy, proxy_credentials), **given)

    return proxy_options(called)


def proxy_options(command: F) -> F:
    """Add --proxy and --proxy-credentials to a command."""
    credentials = click.option(
        "--proxy-credentials", type=FILE, metavar="FILE", help="A file with USER:PASSWORD for the proxy (Basic authentication)."
    )
    proxy = click.option(
        "--proxy", metavar="HOST:PORT", help="Reach the server, and S3 stores, through this HTTP proxy; env: the environment's."
    )
    return proxy(credentials(command))


token_file_option = click.option(
    "--token-file", metavar="FILE", help="A file with the join token, so that other users do not see it; - is standard input."
)


def token_in(text: str | None, file: str | None) -> str | None:
    """Return the join token that was given as text or in a file, if any.

    Raises:
        SettingError: The file cannot be read.
        click.UsageError: Both were given.
    """
    if file is None:
        return text
    if text is not None:
        raise click.UsageError("--token and --token-file are two tokens: give one")
    try:
        with click.open_file(file, encoding="utf-8") as source:
            return str(source.read(MAX_TOKEN_FILE)).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"cannot read a token from {file}: {error}") from None


@dataclass(frozen=True)
class ModelPlace:
    """Place of a finished model, as the options of `model_place` say it.

    Attributes:
        server: Where the device's server listens; None: any.
        home: The device's folder; None: it is looked for.
        model: A model's own folder, in place of a home, or a home. What holds it has no other files of a device.
    """

    server: str | None
    home: Path | None
    model: Path | None = None

    def home_of(self, shard: Path | None, label: str = "") -> DeviceHome:
        """Return the home of the finished model. This does not import torch, so errors come at once.

        Args:
            shard: The device's data; None: any.
            label: Of several devices, the name of this one's folder; no other home than the shard's is taken.

        Raises:
            click.UsageError: There is a model's folder and a home.
            AttuneError: As in `with_model`.
        """
        from attune.fedclient.address import ServerAddress
        from attune.fedclient.home import DeviceHome, with_model

        home, model = (folder / label if folder and label else folder for folder in (self.home, self.model))
        if model is None:
            return with_model(home, ServerAddress.parse(self.server) if self.server else None, shard, bool(label))
        if home or self.server:
            raise click.UsageError("--model names the model: leave --home and --server out")
        of_model = DeviceHome(model)
        if not (of_model.model / "model.json").exists():
            of_model.model = model
        return of_model


def model_place(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say where a finished model is, for a command that takes a ModelPlace."""

    @wraps(command)
    def placed(*, server: str | None, home: Path | None, model: Path | None, **given: Any) -> None:
        command(place=ModelPlace(server, home, model), **given)

    model = click.option(
        "--model", type=FOLDER, metavar="DIR",
        help="A finished model's folder, such as models/NAME of `simulate --out` and Result.save; in place of --home.",
    )  # fmt: skip
    return server_option()(home_option(model(placed)))
