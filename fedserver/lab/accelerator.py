"""The processor on which this process's aggregators do their large products: the CPU, unless the lab says otherwise.

One for the process, as the number of threads is: a state that is made again must be made where it was made first.
"""

from __future__ import annotations

import torch

from attune.common.hardware import choose

_used = torch.device("cpu")


def use(name: str) -> torch.device:
    """From now on `name`: auto, cpu, cuda, cuda:N or mps. Errors: SettingError if this machine has no such processor."""
    global _used
    _used = choose(name, "server.device")
    return _used


def used() -> torch.device:
    """What aggregators that are made now compute on."""
    return _used
