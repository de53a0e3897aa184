"""The processor on which this process's aggregators do their large products: the CPU, unless the lab says otherwise.

One for the process, as the number of threads is: a state that is made again must be made where it was made first.
"""

from __future__ import annotations

import torch

from attune.common.hardware import choose

_used = torch.device("cpu")


def use(name: str) -> torch.device:
    """Compute on `name` from now on: auto, cpu, cuda, cuda:N or mps.

    Raises:
        SettingError: This machine has no such processor.
    """
    global _used
    _used = choose(name, "server.device")
    return _used


def used() -> torch.device:
    """Return the processor on which new aggregators compute."""
    return _used
