"""Regression: each device predicts a number with a model of its own, which is better here than a common one."""

from __future__ import annotations

import numpy as np

import attune


def device(seed: int, slope: float) -> tuple[np.ndarray, np.ndarray]:
    """Return x (N, 3) and y (N,), a dose in milligrams, which depends on the first column differently on each device."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(120, 3)).astype(np.float32)
    return x, 50 + 10 * (slope * x[:, 0] + x[:, 1] + 0.3 * rng.normal(size=120))


def main(rounds: int = 10) -> attune.Result:
    shards = {f"clinic{number}": device(number, slope) for number, slope in enumerate((-1.0, 0.0, 1.0))}
    settings = {"train.lr": 0.05, "train.batch_size": 16, "method.tune_epochs": 10}
    result = attune.simulate(shards, "fedavg+ft", rounds=rounds, task="regression", settings=settings, baseline="alone+local")
    print(result.table())
    x, y = device(0, -1.0)
    for predicted, true in zip(result.model("clinic0").predict(x[:3]), y[:3], strict=True):
        print(f"predicted {predicted:.1f} mg, true {true:.1f} mg")
    return result


if __name__ == "__main__":
    main()
