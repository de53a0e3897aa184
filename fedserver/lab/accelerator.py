"""The processor on which this process's aggregators do their large products: the CPU, unless the lab says otherwise.

The whole process has one, as it has one number of threads, because a state that is made again must be made on the processor
on which it was made first.
"""

from __future__ import annotations

import torch

from attune.common.hardware import choose

_used = torch.device("cpu")


def use(name: str) -> torch.device:
    """Compute on `name` from now on: auto, cpu, cuda or cuda:N.

    Raises:
        SettingError: This machine has no such processor.
    """
    global _used
    _used = choose(name, "server.device", float64=True)
    return _used


def used() -> torch.device:
    """Return the processor on which new aggregators compute."""
    return _used
