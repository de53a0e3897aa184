"""What lives in a worker. It knows nothing of how it is asked, and what it holds can be made again from the server's vault."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import version

import torch

from attune.fedserver.lab.cluster.columns import ColumnHand
from attune.fedserver.lab.cluster.head_hand import HeadHand

KEPT_SHARE = 4  # of a machine's memory its workers hold a quarter as state


@dataclass(frozen=True)
class Facts:
    """Of a worker. pid: on its machine. attune, torch: versions. kept_bytes: how much state of columns it may hold."""

    pid: int
    attune: str
    torch: str
    kept_bytes: int


class Hand(ColumnHand, HeadHand):
    """threads: for its computations, as many as the server's lab has, or sums of products would round differently."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        ColumnHand.__init__(self)
        HeadHand.__init__(self)

    def facts(self) -> Facts:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        workers = max(1, (os.cpu_count() or 1) // torch.get_num_threads())
        return Facts(os.getpid(), version("attune-fl"), torch.__version__, memory_bytes // KEPT_SHARE // workers)
