"""The command `fedclient` itself, which takes part in a federation, and the group of its other commands."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attune import seams
from attune.common.command_group import FILE, ExtensibleGroup
from attune.common.config import read_toml
from attune.common.errors import SettingError, nearest
from attune.common.plan import LIGHT
from attune.fedclient.cli import device_commands, model_commands
from attune.fedclient.cli.shared import (
    allow_model_option,
    data_option,
    home_option,
    name_option,
    proxy_options,
    reported,
    server_option,
    timeout_option,
    token_file_option,
    token_in,
)
from attune.fedclient.table_options import EXECUTOR, NAMES, baseline_option, table_options

if TYPE_CHECKING:
    from attune.fedclient.console import Console
    from attune.fedclient.options import DeviceOptions
    from attune.fedclient.work.executor import ExecutorName

# The options that may stand in the file: the owner's decisions. A key is the option's name without the dashes before it.
KEYS = (
    "columns", "map", "decimal", "disclose", "share-model", "metrics", "schema", "units",
    "max-epsilon", "max-delta", "min-samples", "min-devices", "authority", "signer",
    "only-model", "only-run", "allow-model", "allow-plugin", "max-epochs", "max-model-bytes", "max-order", "max-orders",
    "proxy", "proxy-credentials", "only-when", "nice", "max-memory", "max-disk", "max-rate",
)  # fmt: skip
NOT_EMPTY = ("columns", "only-model", "only-run")  # without a name such an option allows everything


def decided(path: Path, ctx: click.Context) -> dict[str, Any]:
    """Return the options that a site's file decides, by the names of the command's parameters.

    Raises:
        SettingError: The file cannot be read, a key is unknown, a value is not one of the option's, or the command line has the
            same option.
    """
    values, parameters = read_toml(path), _parameters(ctx.command)
    if unknown := sorted(set(values) - set(KEYS)):
        raise SettingError(f"{path}: unknown key {unknown[0]!r}{nearest(unknown[0].replace('_', '-'), KEYS)}")
    options = {}
    for key, value in values.items():
        option = parameters[key]
        name = str(option.name)
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise SettingError(f"{path} decides {key}: leave --{key} out")
        options[name] = _converted(path, key, value, option, ctx)
    return options


def _parameters(command: click.Command) -> dict[str, click.Option]:
    return {
        name.removeprefix("--"): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
    }


def _converted(path: Path, key: str, value: Any, option: click.Option, ctx: click.Context) -> Any:
    """Return a value of the file as the option has it."""
    option_value: Any  # None: it is of another type
    if key == "columns":  # a list in the file, which is easier to read
        option_value, wanted = ",".join(map(_quoted, value)) if _is_texts(value) else None, "a list with at least one name"
    elif option.multiple:
        option_value, wanted = (
            value if _is_texts(value) else None,
            "a list with at least one text" if key in NOT_EMPTY else "a list of texts",
        )
    elif option.is_flag:
        option_value, wanted = value if isinstance(value, bool) else None, "true or false"
    elif isinstance(option.type, click.types.IntParamType):
        option_value, wanted = value if type(value) is int else None, "a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        option_value, wanted = value if type(value) in (int, float) and math.isfinite(value) else None, "a finite number"
    else:
        option_value, wanted = value if isinstance(value, str) else None, "a text"
    if option_value is None or (key in NOT_EMPTY and not value):
        raise SettingError(f"{path}: {key} is {wanted}, not {value!r}")
    try:
        return option.type_cast_value(ctx, option_value)
    except click.BadParameter as error:
        raise SettingError(f"{path}: {key}: {error.message}") from None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _quoted(name: str) -> str:
    """Return a name as a cell of CSV, as --columns reads it."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


# Keeps gRPC's core from printing to stderr. It reads this variable when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

COMMANDS = (
    device_commands.join, device_commands.doctor, device_commands.verify, device_commands.disclosed,
    model_commands.evaluate, model_commands.predict, model_commands.export, model_commands.verify_model,
    device_commands.describe, device_commands.shard,
)  # fmt: skip


class DeviceCommands(ExtensibleGroup):
    """Commands of `fedclient`. An error becomes one line on stderr; for an unknown command the nearest one is suggested."""

    entry_point_group = "attune.fedclient.commands"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            {*super().list_commands(ctx), *(name for feature in seams.features() for name in feature.device_commands)}
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = seams.answer("device_commands", cmd_name) or super().get_command(ctx, cmd_name)
        if command is None and cmd_name in seams.DEVICE_COMMANDS:
            raise seams.absent(seams.DEVICE_COMMANDS[cmd_name], f"fedclient {cmd_name}")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        with reported():
            return super().invoke(ctx)

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


@click.group(
    cls=DeviceCommands, commands=COMMANDS, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@data_option(
    "A folder with train.npz [, test.npz], one .npz or a table. A quoted pattern ('shards/*') starts a device for each match."
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
    help="best: a blend of the models, weighted on samples held out of training; personalized: this device's model alone.",
)  # fmt: skip
@baseline_option
@click.option(
    "--executor", type=EXECUTOR, default="sequential", show_default=True,
    help="How several devices train: one after the other, together, in processes or on Ray.",
)  # fmt: skip
@allow_model_option
@click.option(
    "--allow-plugin", multiple=True, metavar="NAME", help="Installed package whose code the federation may run on this device."
)
@proxy_options
@click.option("--max-epochs", type=click.IntRange(1), default=1000, show_default=True, help="Most epochs of one order.")
@click.option(
    "--max-model-bytes", type=click.IntRange(1), default=4 << 30, show_default=True,
    help="Largest model that the server may name.",
)  # fmt: skip
@click.option(
    "--max-order", type=click.FloatRange(1), default=86_400, show_default=True, metavar="S",
    help="Give up an order after this many seconds, whatever the server says.",
)  # fmt: skip
@click.option(
    "--max-orders", type=click.IntRange(1), default=100_000, show_default=True, help="Most orders of this device in all."
)
@click.option(
    "--max-epsilon", type=click.FloatRange(0, min_open=True),
    help="Most privacy that may be spent on these data in all. Training without noise is refused then.",
)  # fmt: skip
@click.option(
    "--max-delta", type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Largest privacy.delta. With --max-epsilon it is 1 / samples if nothing else is said.",
)  # fmt: skip
@click.option("--min-samples", type=click.IntRange(1), help="Fewest training samples with which this device takes part.")
@click.option(
    "--metrics", type=click.Choice(["none", "noisy", "all"]),
    help="Losses and scores that the server is told (default: none where training is private, else all). noisy: those of "
    "training, with noise that is charged to the budget.",
)  # fmt: skip
@click.option("--new-data", is_flag=True, help="The data were replaced by those of other people: nothing was spent on them.")
@click.option("--nice", type=click.IntRange(0, 19), default=0, help="Lower this process's priority by this much.")
@click.option("--max-memory", type=click.IntRange(1 << 28), metavar="BYTES", help="Most memory of this process.")
@click.option("--max-disk", type=click.IntRange(1), metavar="BYTES", help="Most bytes in this device's home.")
@click.option("--max-rate", type=click.FloatRange(1024), metavar="BYTES", help="Most bytes per second to and from the server.")
@click.option(
    "--only-when", multiple=True, metavar="WHEN",
    help="Train only while the machine is idle or charging, or at these hours, such as 22:00-06:00 (may be repeated).",
)  # fmt: skip
@click.option(
    "--only-model", multiple=True, metavar="NAME", help="Take part only with these models.  [default: all built-in ones]"
)
@click.option(
    "--variant", default="main", show_default=True, metavar="NAME", help="Variant of the model; light: the closed form alone."
)
@click.option("--tag", default="", metavar="NAME", help="A tag of this device, to which the operator may limit rounds.")
@click.option("--only-run", multiple=True, metavar="NAME", help="Take part only in these runs.  [default: all]")
@click.option(
    "--site", type=FILE, metavar="TOML",
    help="File with the decisions of the data's owner, which the command line may not change.",
)  # fmt: skip
@click.option(
    "--disclose", multiple=True, type=click.Choice(["statistics", "masked-statistics", "sums"]),
    help="statistics: sums of columns and targets, class shares. masked-statistics: only in a sum over 5 devices. "
    "sums: for --method analytic.",
)  # fmt: skip
@click.option(
    "--share-model", is_flag=True,
    help="In a `fedserver evaluate --matrix`, let the server and the other sites have this device's finished network. Its "
    "parameters can reveal samples that it was trained on.",
)  # fmt: skip
@click.option(
    "--units", type=click.Choice(["all", "none"]), default="all", show_default=True,
    help="Tell the server by a word whether columns of a table fit the ranges of its schema.",
)  # fmt: skip
@click.option(
    "--min-devices", type=click.IntRange(3), metavar="N",
    help="Take part only where the server learns sums of at least N devices' updates.",
)  # fmt: skip
@click.option(
    "--authority",
    metavar="PEM",
    help="In secure aggregation, trust devices with certificates of this authority, not the server's.",
)
@click.option("--signer", metavar="PEM", help="This device's key, and its certificate of --authority.")
@click.option(
    "--rest", type=click.FloatRange(min=0), default=60.0, show_default=True, metavar="S",
    help="Wait in a small process after this many seconds without work; a new one trains. 0: never.",
)  # fmt: skip
@click.option("--stay", is_flag=True, help="After the last round, wait for the federation's next run.")
@click.option(
    "--hooks", metavar="MODULE", help="Module with this device's own train(model, data, context), evaluate(model, data)."
)
@click.version_option(package_name="attune-fl")
@click.pass_context
def main(ctx: click.Context, /, **given: Any) -> None:
    """Train on this device's data and end with a model of its own.

    Example: fedclient --data shard3 --server localhost:50051
    """
    if ctx.invoked_subcommand is not None:
        return
    if not given["data"] or given["server"] is None:
        raise click.UsageError("Missing option '--data' or '--server'. Try: fedclient --data SHARD --server HOST:PORT", ctx)
    _train(given | (decided(given["site"], ctx) if given["site"] else {}))


def _train(given: dict[str, Any]) -> None:
    from attune.fedclient import resting, shards
    from attune.fedclient.client import Client
    from attune.fedclient.console import console
    from attune.fedclient.gate import PrivacyLimits
    from attune.fedclient.limits import OrderLimits
    from attune.fedclient.options import NONE, Hooks
    from attune.fedclient.resource_limits import ResourceLimits

    hooks = Hooks.of_module(given["hooks"]) if given["hooks"] else NONE
    same = ("server", "home", "name", "device", "threads", "keep", "baseline", "stay", "label", "authority", "signer", "units",
            "variant", "tag",
            "proxy", "proxy_credentials")  # fmt: skip
    client = Client(
        data=Path(given["data"][0]),
        model=given["allow_models"],
        plugins=given["allow_plugin"],
        disclose=(*given["disclose"], *["model"] * given["share_model"]),
        token=token_in(given["token"], given["token_file"]),
        connect_timeout_s=given["connect_timeout"],
        limits=OrderLimits(
            given["max_epochs"],
            given["max_model_bytes"],
            given["max_order"],
            given["max_orders"],
            given["only_model"],
            given["only_run"],
        ),
        privacy=PrivacyLimits(
            given["max_epsilon"],
            given["max_delta"],
            given["min_samples"] or 0,
            given["metrics"],
            given["new_data"],
            given["min_devices"] or 0,
        ),
        resources=ResourceLimits(
            given["nice"], given["max_memory"] or 0, given["max_disk"] or 0, given["max_rate"] or 0.0, tuple(given["only_when"])
        ),
        train=hooks.train,
        evaluate=hooks.evaluate,
        table={name: given[name] for name in NAMES if name != "label"},
        **{name: given[name] for name in same},
    )
    fleet = shards.members(shards.expand(given["data"]), client.options) if shards.is_fleet(given["data"]) else None
    screen = console()

    def leave(signum: int, frame: object) -> None:
        # The state on disk is safe at every moment, so there is no need to wait for the current batch or the network.
        screen.close()
        with contextlib.suppress(AttributeError, BrokenPipeError):  # there is no stdout, or nobody reads it
            sys.stdout.flush()
        os.write(2, b"fedclient: stopped; finished work is saved, start again to continue\n")
        os._exit(128 + signum)

    client.options.resources.apply()
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, leave)
    try:
        is_small = client.options.variant == LIGHT or "torch" in sys.modules  # or too late to be
        if fleet is None and given["rest"] and not is_small and sys.platform != "win32":
            resting.run(client.options, screen, given["rest"])
        elif fleet is None:
            client.take_part(screen)
        else:
            _train_fleet(fleet, screen, given["executor"])
    finally:
        screen.close()


def _train_fleet(fleet: list[DeviceOptions], screen: Console, executor: ExecutorName) -> None:
    from attune.fedclient import fleet as hosted

    outcomes = hosted.run(fleet, screen, executor)
    screen.close()
    for line in hosted.table(outcomes):
        click.echo(line)
    for line in hosted.failures(outcomes):
        click.echo(f"fedclient: {line}", err=True)
    sys.exit(hosted.exit_code(outcomes))
