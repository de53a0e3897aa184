"""Next states that no aggregator makes of updates: an earlier one, or one near the present one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from attune.common.seeds import derive
from attune.fedserver.core.records import Slot
from attune.fedserver.lab.aggregators.base import Tensors, write
from attune.fedserver.lab.aggregators.mixing import CLIENT, COLD_START
from attune.fedserver.lab.groups import Group
from attune.fedserver.lab.vault import StateVault
from attune.fedserver.ports.blobs import blob_of

SHARE_MOVED = 0.01  # of a number, by which another start differs at most
FROM_ZERO = 0.001  # likewise, in a tensor of zeros


def stage_earlier(vaults: Mapping[str, StateVault], present: Iterable[Slot], slots: Iterable[Slot]) -> None:
    """Stage an earlier state's slots. Clients without a value of their own at that time fall back to the cold start."""
    names = {(slot.part, slot.key) for slot in slots}
    for slot in sorted(set(slots) - set(present), key=lambda slot: slot.file):
        vaults[slot.part].stage(slot.key, blob_of(slot))
    for slot in present:
        if slot.key.startswith(CLIENT) and (slot.part, slot.key) not in names:
            vault = vaults[slot.part]
            write(vault, slot.key, vault.read(COLD_START))


def stage_another(groups: Mapping[str, Group], seed: int, closed: int) -> None:
    """Stage values that all clients share, each number a little moved. A restart repeats the bits.

    Args:
        groups: Parts of the state; their aggregators know which value is served.
        seed: The federation's seed.
        closed: The number of rounds that the present state has taken in.
    """
    for name, group in sorted(groups.items()):
        if (slot := group.aggregator.slot("")) is not None:
            write(group.vault, slot, moved(group.vault.read(slot), derive(seed, "another start", closed, name)))


def moved(tensors: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """Return tensors near these: each floating number by up to SHARE_MOVED of itself, those of a tensor of zeros by FROM_ZERO.

    Other zeros stay, and so does each sign: a variance stays one.
    """
    draws, near = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name in sorted(tensors):
        near[name] = tensor = tensors[name]
        if tensor.is_floating_point():
            shares = 2 * torch.rand(tensor.shape, generator=draws, dtype=torch.float64) - 1
            scale = SHARE_MOVED * tensor.double() if bool(tensor.any()) else FROM_ZERO
            near[name] = (tensor.double() + scale * shares).to(tensor.dtype)
    return near
