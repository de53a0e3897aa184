"""The command `fedclient`. Heavy imports wait until a command needs them: --help answers at once."""

from attune.fedclient.cli.root import main

__all__ = ["main"]
