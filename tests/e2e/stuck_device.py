"""A fedclient that stays in its first local training, so that a test can kill it there. The product has no hook for this.

Run as a program with the arguments of fedclient; it touches the file $STRUCK_AT after the first batch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from attune.fedclient import cli
from attune.fedclient.work import trainer

train = trainer.Trainer.train


def endlessly(self, theta, received, x, y, seeds, progress, cancelled, trains=()):
    def stay(done):
        Path(os.environ["STRUCK_AT"]).touch()
        time.sleep(3600)

    return train(self, theta, received, x, y, seeds, stay, cancelled, trains)


if __name__ == "__main__":
    trainer.Trainer.train = endlessly
    cli.main()
