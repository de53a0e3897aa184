"""Which model a device keeps, decided on samples that none of them was trained on, and never on the test part."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from attune.fedclient.work.state import Choice


def choose(right: Mapping[Choice, Tensor]) -> Choice:
    """The personalized model, unless another is clearly right more often.

    right: for every model, on the same V validation samples, which it labels rightly, (V,) bool, or (V, T) where each of T
    positions has a label. Clearly: the sum of the differences between two models exceeds one standard error, the root of the
    sum of their squares; with one label a sample, of the number of samples that only one of the two labels rightly. The
    positions of a sequence are not independent, so a sequence has one difference.
    """
    best: Choice = "personalized"
    for name, right_V in right.items():
        gain_V = (right_V.double() - right[best].double()).view(len(right_V), -1).sum(dim=1)
        if float(gain_V.sum()) > math.sqrt(float(gain_V.square().sum())):
            best = name
    return best
