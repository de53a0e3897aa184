"""Five devices with two digits each, in this process: does FedTP help them, compared with FedAvg?"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

import attune


def main(rounds: int = 20) -> None:
    """Print a table for each method."""
    digits = load_digits()
    x = digits.images.astype(np.float32)[..., None] / 16
    shards = {}
    for device in range(5):
        mine = np.flatnonzero(np.isin(digits.target, (2 * device, 2 * device + 1)))[:100]
        shards[f"device{device}"] = (x[mine], digits.target[mine])
    for method in ("fedtp", "fedavg"):
        result = attune.simulate(shards, method, rounds=rounds, progress=True)
        print(f"\n{method}\n{result.table()}")


if __name__ == "__main__":
    main()
