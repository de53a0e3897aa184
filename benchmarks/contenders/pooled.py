"""scikit-learn's logistic regression on the training samples of all devices in one place: what a federation stands beside.

It prints a line before and after the fit, so that the time between them is the fit's.
"""

from __future__ import annotations

import numpy as np
from sklearn.linear_model import LogisticRegression

from benchmarks.contenders import task


def main() -> None:
    path, _ = task.given()
    arrays = task.arrays(path)
    x, y, test_x, test_y = (np.concatenate(some) for some in zip(*arrays, strict=True))
    task.say_round()
    fitted = LogisticRegression(max_iter=1000).fit(x.reshape(len(x), -1), y)
    task.say_round()
    task.say_accuracy(float(fitted.score(test_x.reshape(len(test_x), -1), test_y)))


if __name__ == "__main__":
    main()
