"""Description of the machine, without which measured figures mean nothing."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import Any

from attune.common.hardware import processor_name


def machine() -> dict[str, Any]:
    """Return the processor, cores, load before the run, and the versions that matter."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load_1_min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "torch": version("torch"),
    }
