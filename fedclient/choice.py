"""Which model a device keeps, decided on samples that none of them was trained on, and never on the test part."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from fedclient.state import Choice


def choose(right: Mapping[Choice, Tensor]) -> Choice:
    """The personalized model, unless another is clearly right more often.

    right: for every model, on the same V validation samples, which it labels rightly, (V,) bool. Clearly: of the samples that
    only one of the two labels rightly, the difference exceeds one standard error, the root of their number.
    """
    best: Choice = "personalized"
    for name, right_V in right.items():
        won, lost = int((right_V & ~right[best]).sum()), int((right[best] & ~right_V).sum())
        if won - lost > math.sqrt(won + lost):
            best = name
    return best
