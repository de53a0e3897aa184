"""`attune.simulate`. It also evaluates every device before and after training, and weighs its models; the others only train."""

from __future__ import annotations

import sys
from typing import Any

import attune
from benchmarks.contenders import task

SETTINGS = {
    "train.local_steps": task.STEPS, "train.batch_size": task.BATCH, "train.lr": task.RATE, "train.momentum": 0.0,
    "train.clip_norm": 0.0, "train.validation": 0.0,
}  # fmt: skip


def main() -> None:
    path, rounds = task.given()
    executor: Any = sys.argv[3]
    arrays = task.arrays(path)
    net = task.model(arrays[0][0].shape[1:])
    shards = {f"device{number:03}": device for number, device in enumerate(arrays)}
    trained = 0

    def heard(share: float) -> None:
        nonlocal trained
        trained += 1
        if trained % len(shards) == 0 and trained <= rounds * len(shards):
            task.say_round()

    settings = SETTINGS | {"round.evaluate_every": rounds + 1, "round.evaluate_each_last": 0}
    result = attune.simulate(shards, "fedavg", net, rounds, 0, settings, executor=executor, progress=heard)
    task.say_accuracy(result.table().mean("accuracy"))


if __name__ == "__main__":
    main()
