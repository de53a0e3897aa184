"""The command line of the server. Heavy imports wait until a command needs them: --help answers at once."""

from attune.fedserver.cli.root import cli, main

__all__ = ["cli", "main"]
