"""A fedserver whose aggregation does not end, so that a test can strike during it. The product has no hook for this.

Run as a program with the arguments of fedserver; it touches the file $STRUCK_AT when all is staged and nothing committed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from attune.fedserver import cli
from attune.fedserver.lab.engine import Engine


def endless(close):
    def endlessly(engine, *arguments):
        close(engine, *arguments)
        Path(os.environ["STRUCK_AT"]).touch()
        time.sleep(3600)

    return endlessly


if __name__ == "__main__":
    Engine.aggregate, Engine.adapt = endless(Engine.aggregate), endless(Engine.adapt)
    cli.main()
