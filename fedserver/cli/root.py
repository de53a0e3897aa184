"""The command itself: it starts the server, and has the other commands."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

import click

from attune import seams
from attune.common import homes
from attune.common.command_group import ExtensibleGroup
from attune.common.config import load_settings
from attune.common.errors import AttuneError, SettingError, needing
from attune.fedserver.cli import results, running, tokens
from attune.fedserver.cli.shared import ALLOW_CODE, HOME, SETTINGS

COMMANDS = (
    tokens.token, tokens.revoke,
    running.pause, running.resume, running.status, running.tls_name,
    tokens.audit, tokens.backup, tokens.restore, tokens.verify,
    *results.COMMANDS,
    running.run, running.forget,
)  # fmt: skip


def main() -> None:
    """Run the command; an AttuneError becomes one line on stderr and its exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (AttuneError, ModuleNotFoundError) as error:
        click.echo(f"fedserver: {needing(error)}", err=True)
        sys.exit(needing(error).exit_code)
    except OSError as error:
        click.echo(f"fedserver: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", err=True)
        sys.exit(1)
    except RuntimeError as error:
        if not homes.is_homeless(error):
            raise
        click.echo(f"fedserver: {homes.HOMELESS}", err=True)
        sys.exit(SettingError.exit_code)


class ServerCommands(ExtensibleGroup):
    """The commands of `fedserver`."""

    entry_point_group = "attune.fedserver.commands"

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(name for feature in seams.features() for name in feature.commands)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command: click.Command | None = seams.answer("commands", cmd_name) or super().get_command(ctx, cmd_name)
        if command is None and cmd_name in seams.COMMANDS:
            raise seams.absent(seams.COMMANDS[cmd_name], f"fedserver {cmd_name}")
        return command


@click.group(
    cls=ServerCommands, commands=COMMANDS, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--port", type=click.IntRange(0, 65535), help="0 picks a free one (default: the home's last port, else 50051).")
@click.option("--host", help="Address to listen on (default: the home's last one, else all).")
@HOME
@SETTINGS
@click.option("--exit-when-done", is_flag=True, help="Stop after the last round instead of serving latecomers.")
@click.option(
    "--join-uses", type=click.IntRange(1), default=1, show_default=True, help="How many devices the printed token admits."
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Form of the log's lines."
)
@click.option("-q", "--quiet", is_flag=True, help="Say only what goes wrong.")
@click.option("-v", "--verbose", is_flag=True, help="Say more, for finding faults.")
@click.option(
    "--dashboard", metavar="[HOST:]PORT|off", help="The page's place (default: the last one, else on this machine alone)."
)
@click.option(
    "--ledger",
    metavar="postgresql://...",
    help="A database for the ledger, with --blobs (default: the last one, else the home).",
)
@click.option("--blobs", metavar="s3://BUCKET/PREFIX", help="A place for tensors and updates, with --ledger.")
@ALLOW_CODE
@click.version_option(package_name="attune-fl")
@click.pass_context
def cli(
    context: click.Context,
    /,
    assignments: tuple[str, ...],
    log_format: Literal["text", "json"],
    quiet: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Run the aggregation server. The commands show or change the home of a server."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(None, assignments, {})
    from attune.fedserver import logs, process
    from attune.fedserver.serve import serve

    verbosity = int(verbose) - int(quiet)
    logs.begin(log_format, verbosity)
    process.prepare_memory()
    say = logs.speaker(log_format, verbosity, click.echo)
    serve(settings=settings, say=say, **given)
