"""Place where the pieces of rounds are computed, as `--lab` names it. This module imports neither Ray nor torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec

from attune.common.errors import SettingError

ADDRESS = re.compile(r"ray://([^/\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


@dataclass(frozen=True)
class LabLocation:
    """The values of --lab and --lab-workers.

    Attributes:
        lab: "local" (this process), "ray" (a cluster that has this machine) or ray://HOST:PORT.
        workers: How many workers; 0 takes as many as the cluster has processors for.

    Raises:
        SettingError: For anything else, or without Ray.
    """

    lab: str = "local"
    workers: int = 0

    def __post_init__(self) -> None:
        if self.is_here and self.workers:
            raise SettingError("--lab-workers: there are none with --lab local; say where with --lab")
        if self.lab not in ("local", "ray") and not ADDRESS.fullmatch(self.lab):
            raise SettingError(
                f"--lab {self.lab}: say local, ray (a Ray cluster of this machine) or ray://HOST:PORT (a cluster of yours)"
            )
        if not self.is_here and find_spec("ray") is None:
            raise SettingError(f"--lab {self.lab} needs Ray: pip install 'attune-fl[ray]'")

    @property
    def is_here(self) -> bool:
        """True if this process computes everything."""
        return self.lab == "local"

    @property
    def address(self) -> str:
        """Address of a cluster that exists already; empty if there is none."""
        return self.lab if self.lab.startswith("ray://") else ""

    def device(self, name: str) -> str:
        """Return the processor that this server uses where the settings say `name`; with workers it is the CPU, as theirs is.

        Raises:
            SettingError: For a device that the workers do not have.
        """
        if self.is_here or name == "cpu":
            return name
        if name != "auto":
            raise SettingError(f"server.device {name}: the workers of --lab {self.lab} have no GPU; leave one of them out")
        return "cpu"


THIS_PROCESS = LabLocation()
