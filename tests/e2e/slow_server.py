"""A fedserver whose aggregation does not end, so that a test can strike during it. The product has no hook for this.

Run as a program with the arguments of fedserver; it touches the file $STRUCK_AT when all is staged and nothing committed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from fedserver import cli
from fedserver.engine import Engine

aggregate = Engine.aggregate


def endlessly(engine, entries):
    aggregate(engine, entries)
    Path(os.environ["STRUCK_AT"]).touch()
    time.sleep(3600)


if __name__ == "__main__":
    Engine.aggregate = endlessly
    cli.main()
