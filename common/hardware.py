"""Choice of the processor for tensors, and of its number of threads; name of this machine's processor; memory given back.

torch is imported where it is used.
"""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from attune.common.errors import SettingError

if TYPE_CHECKING:
    import torch


def choose(name: str, where: str = "--device", float64: bool = False) -> torch.device:
    """Return the torch device for `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.

    Args:
        name: One of these names.
        where: The flag or setting, for errors.
        float64: Whether the device must have this type. MPS has not.

    Raises:
        SettingError: This machine has no such device.
    """
    import torch

    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() and not float64 else "cpu")
    if name == "mps" and float64:
        raise SettingError(f"{where} mps: it has no float64, in which sums are taken; try {where} auto")
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise SettingError(f"{where} takes auto, cpu, cuda, cuda:N{'' if float64 else ' or mps'}, not {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(f"{where} {name}: this machine shows {torch.cuda.device_count()} CUDA devices; try {where} auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise SettingError(f"{where} mps: not available on this machine; try {where} auto")
    return device


def set_threads(threads: int) -> None:
    """Set the number of threads of one operator for the calling thread; at least one."""
    import torch

    torch.set_num_threads(max(threads, 1))


def processor_name() -> str:
    """Return the model of this machine's processor, or else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def return_free_memory() -> None:
    """Give the pages of freed blocks back to the system, within milliseconds. No-op with another library than glibc.

    The C library keeps them between blocks in use, and a new block that is hardly written to then has them all: of 200
    connections that ended, 107 KiB each stayed instead of 19, and those that came after them took 123 KiB each instead of 84.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
