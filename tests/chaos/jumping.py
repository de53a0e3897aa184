"""A fedserver whose time of day jumps by up to an hour, back and forth, each time it is read."""

import logging
import random
import sys
import time
from functools import partial
from pathlib import Path

from attune.common import aio

JUMP_S = 3600.0  # largest jump of the clock


def main() -> None:
    from attune.common.config import load_settings
    from attune.fedserver.app import ServerOptions, run
    from attune.fedserver.federation.steps import Clock

    _, home, port, *assignments = sys.argv
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    jumps = random.Random(0)
    clock = Clock(unix=lambda: time.time() + jumps.uniform(-JUMP_S, JUMP_S))
    overrides = load_settings(None, assignments, {})
    say = partial(print, flush=True)
    options = ServerOptions(Path(home), "127.0.0.1", int(port), False, say, clock=clock, join_uses=100)
    aio.run(run(options, overrides))
