"""Closed form: each device is served the ridge regression of all other devices' samples, from the sums of each.

He et al., AFL, CVPR 2025; docs/methods/analytic.md. The letters are those of common.methods.ridge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from attune.common.errors import UpdateRefused
from attune.common.exchange.transform import NotASum, PartUpdate
from attune.common.methods.ridge import (
    BLOCK,
    COUNTED,
    CROSS,
    ERRORS,
    FEWEST,
    GAMMA,
    GAMMAS,
    GRAM,
    SIZES,
    SQUARES,
    STRENGTH,
    STRENGTHS,
    WEIGHT,
    blocks_of,
    check_sums,
    sizes_of,
    solved,
    squared_error,
)
from attune.common.methods.settings.aggregators import ClosedFormSettings
from attune.fedserver.core.voices import bounded
from attune.fedserver.lab.aggregators.base import IN_TURN, Carrier, Tensors, Vault, cohort, write

START, TOTAL, OF = "start", "total", "sums/"  # keys in the vault; OF and a client's name: its latest sums, as they count
MEMBERS = "members"  # the total as clients that are in one sum are served it
SUMMED = (GRAM, CROSS, SQUARES)
BlockSums = tuple[slice, Tensor, Tensor]  # as of blocks_of
GROUPS = 10  # of clients that are left out together, to choose gamma
CLEARLY = 3.0  # standard errors by which another block must be better than the first
USUAL_STRENGTH = 1.0  # before devices have reported errors
USUAL_GAMMA = GAMMAS[len(GAMMAS) // 2]


class ClosedFormSums:
    """The newest sums of every client, their total, and the weights that follow from them.

    A client is served W without its own samples, and the strength with which it draws its own weights from W. A client with
    fewer than FEWEST samples keeps the common weights; its strength is 0. A client that has handed in nothing is served the
    common weights, and draws its own from them. W is of all blocks of features, each with a gamma of its own. One block
    predicts: the clients' errors choose it together with the strength. Memory: 3 + GROUPS squares of D x D numbers.

    Where a round brings one sum of several clients (PartUpdate.members), the first such sum is the total for ever, and its
    clients take their own out of it. Later ones bring the errors of their weights.
    """

    def __init__(
        self,
        settings: ClosedFormSettings,
        vault: Vault,
        seed: int,
        components: Mapping[str, list[str]],
        carrier: Carrier = IN_TURN,
    ) -> None:
        self._vault = vault
        self._read: tuple[Tensors, list[BlockSums]] | None = None  # the total
        self._is_plain = False  # the total is of single sums, and stays so: a vault lists its keys once

    def start(self, initial: Mapping[str, Tensor]) -> None:
        write(self._vault, START, initial)

    def admit(self, client: str, founder: bool = False) -> None:
        """Store nothing: a client counts from its first sums on."""

    def slot(self, client: str) -> str | None:
        if self._is_plain:
            return None
        keys = set(self._vault.keys())
        if MEMBERS in keys and client:
            return MEMBERS if f"{OF}{client}" in keys else TOTAL
        self._is_plain = TOTAL in keys and MEMBERS not in keys
        return None if TOTAL in keys or not client else START  # no value that all share may be moved a little

    def cold_start(self) -> str | Tensors:
        keys = set(self._vault.keys())
        if MEMBERS in keys:  # the sums stay in the federation
            known, public = self._vault.read(TOTAL), (WEIGHT, BLOCK, SIZES)
            return {name: known[name] if name in public else torch.zeros_like(known[name]) for name in known}
        return _served(*self._known(), keep=True) if TOTAL in keys else START

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Yield W without each client's samples, and the strength."""
        total, blocks = self._known()
        keys = set(self._vault.keys())
        for client in clients:
            own_sums = self._vault.read(f"{OF}{client}") if f"{OF}{client}" in keys else None
            if own_sums is None:
                yield client, _served(total, blocks)
            elif float(own_sums[GRAM][-1]) < FEWEST:
                yield client, _served(total, blocks, keep=True)
            else:
                own_blocks = blocks_of(own_sums, sizes_of(total))
                rest = [
                    (place, G - own_DD, B - own_DC)
                    for (place, G, B), (_, own_DD, own_DC) in zip(blocks, own_blocks, strict=True)
                ]
                yield client, _served(total, rest)

    def close_round(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Keep the cohort's sums in place of its older ones, and make the total and the strengths anew.

        The total is summed from all clients' sums in the order of names. So it has the same bits whichever rounds brought
        them, and those of a federation without a client whose sums are gone. A client with more samples than its weight
        (`bound_samples`) counts by a share of its sums. The metrics are the two strengths.
        """
        counted = cohort(updates)
        if not counted:
            return {}
        if counted[0].members:
            return self._close_sum(counted[0])
        for update in counted:
            sums = {name: update.tensors[name] for name in (*SUMMED, ERRORS)}
            share = min(1.0, update.weight / max(float(sums[GRAM][-1]), 1.0))
            write(self._vault, f"{OF}{update.client}", {name: tensor * share for name, tensor in sums.items()})
        total, groups, errors = self._summed()
        sizes = self._sizes()
        gammas, (block, strength) = _gammas(total, groups, sizes), _choice(errors)
        write(self._vault, TOTAL, total | _chosen(sizes, gammas, block, strength))
        self._read = None
        return _figures(gammas, block, strength)

    def fit(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Keep no newcomer's sums: it draws its own weights from the common ones, which must not move."""
        return {}

    def _close_sum(self, update: PartUpdate) -> dict[str, float]:
        """Keep the one sum of several clients; or choose strengths and block by the sum of their errors."""
        who, sums = f"the sum of {len(update.members)} devices", {name: update.tensors[name] for name in (*SUMMED, ERRORS)}
        sizes = self._sizes()
        try:
            check_sums(sums, sizes, False, who)
        except UpdateRefused as refusal:
            raise NotASum(f"{refusal}. One of them has handed in something else, and nobody knows which") from None
        is_first, error_nGL = MEMBERS not in self._vault.keys(), sums[ERRORS]  # noqa: SIM118
        if not (float(sums[GRAM][-1]) if is_first else bool(error_nGL.any())):
            return {}
        for client in update.members if is_first else ():
            write(self._vault, f"{OF}{client}", {COUNTED: torch.ones((), dtype=torch.float64)})
        best_n = torch.full((len(sizes),), GAMMAS.index(USUAL_GAMMA)) if is_first else error_nGL[:, :, 0].argmin(dim=1)
        gammas = [GAMMAS[place] for place in best_n.tolist()]
        block, strength = _choice({who: error_nGL[torch.arange(len(sizes)), best_n, 1:]})
        total = sums if is_first else self._vault.read(TOTAL)
        served = {GRAM: total[GRAM], CROSS: total[CROSS], **_chosen(sizes, gammas, block, strength)}
        served |= _served(served, list(blocks_of(served, sizes)))
        for key, counts in ((TOTAL, 0.0), (MEMBERS, 1.0)):
            write(self._vault, key, served | {COUNTED: torch.tensor(counts, dtype=torch.float64)})
        return _figures(gammas, block, strength)

    def _summed(self) -> tuple[Tensors, list[Tensors], dict[str, Tensor]]:
        """Return the total, the sums of each group of clients, and each client's errors."""
        total, groups, errors = dict[str, Tensor](), list[Tensors](), dict[str, Tensor]()
        for place, key in enumerate(sorted(key for key in self._vault.keys() if key.startswith(OF))):  # noqa: SIM118
            sums = self._vault.read(key)
            if place < GROUPS:
                groups.append({name: torch.zeros_like(sums[name]) for name in SUMMED})
            for name in SUMMED:
                tensor = sums[name]
                total[name] = total.get(name, torch.zeros_like(tensor)) + tensor
                groups[place % GROUPS][name] += tensor
            errors[key.removeprefix(OF)] = sums[ERRORS]
        return total, groups, errors

    def _known(self) -> tuple[Tensors, list[BlockSums]]:
        if self._read is None:
            total = dict(self._vault.read(TOTAL))
            self._read = total, list(blocks_of(total, sizes_of(total)))
        return self._read

    def _sizes(self) -> list[int]:
        return sizes_of(self._vault.read(START))


def _served(total: Mapping[str, Tensor], blocks: Sequence[BlockSums], keep: bool = False) -> Tensors:
    """Return what clients are served of the total, or of these blocks of it. With `keep` they draw no weights of their own."""
    weights = [solved(G_DD, B_DC, gamma) for gamma, (_, G_DD, B_DC) in zip(total[GAMMA].tolist(), blocks, strict=True)]
    strength = total[STRENGTH] * (not keep)
    return {WEIGHT: torch.cat(weights, dim=1), STRENGTH: strength, BLOCK: total[BLOCK], SIZES: total[SIZES]}


def left_out(total: Mapping[str, Tensor], sums: Iterable[tuple[str, Mapping[str, Tensor]]]) -> list[tuple[str, int, float]]:
    """Return for each client (its name, samples, misfit), the largest misfit first.

    The misfit is the squared error of all other clients' weights on the client's samples, as a share of its targets' squares:
    an answer of 0 to all has 1. Labels that contradict all others' have more; so have samples of which nobody else has any.
    It is of the block that predicts.
    """
    sizes, block, rows = sizes_of(total), int(total[BLOCK]), []
    gamma, (_, G_DD, B_DC) = float(total[GAMMA][block]), list(blocks_of(total, sizes))[block]
    for client, own_sums in sums:
        _, own_DD, own_DC = list(blocks_of(own_sums, sizes))[block]
        squares_C = own_sums[SQUARES]
        W_CD = solved(G_DD - own_DD, B_DC - own_DC, gamma)
        squares = max(float(squares_C.sum()), torch.finfo(torch.float64).tiny)
        misfit = squared_error(W_CD, own_DD, own_DC, squares_C) / squares
        rows.append((client, round(float(own_DD[-1, -1])), misfit))
    return sorted(rows, key=lambda row: -row[2])


def _chosen(sizes: Sequence[int], gammas: Sequence[float], block: int, strength: float) -> Tensors:
    """Return the fleet's choices as tensors."""
    numbers = {GAMMA: gammas, STRENGTH: strength, BLOCK: block, SIZES: sizes}
    return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}


def _figures(gammas: Sequence[float], block: int, strength: float) -> dict[str, float]:
    """Return the fleet's choices for people; the block only where there are several."""
    return {GAMMA: gammas[block], STRENGTH: strength, **({BLOCK: float(block)} if len(gammas) > 1 else {})}


def _gammas(total: Tensors, groups: Sequence[Tensors], sizes: Sequence[int]) -> list[float]:
    """Return for each block the strength with the least squared error on groups of clients that are left out.

    With one client it is the middle.
    """
    if len(groups) < 2:
        return [USUAL_GAMMA] * len(sizes)
    error_nG = torch.zeros(len(sizes), len(GAMMAS), dtype=torch.float64)
    wholes = list(blocks_of(total, sizes))
    for group in groups:
        for block, ((_, G_DD, B_DC), (_, own_DD, own_DC)) in enumerate(zip(wholes, blocks_of(group, sizes), strict=True)):
            rest_DD, rest_DC = G_DD - own_DD, B_DC - own_DC
            for place, gamma in enumerate(GAMMAS):
                error_nG[block, place] += squared_error(solved(rest_DD, rest_DC, gamma), own_DD, own_DC, group[SQUARES])
    return [GAMMAS[place] for place in error_nG.argmin(dim=1).tolist()]


def _choice(errors: Mapping[str, Tensor]) -> tuple[int, float]:
    """Return the block and the strength with the least error over the clients, none of which has more than a bounded vote.

    Another block than the first must be clearly better, because blocks differ by the luck of their draw.

    Args:
        errors: For each client the errors of each block and strength, (n, L); all 0: it reports none.
    """
    reported = {client: error_nL.flatten().tolist() for client, error_nL in errors.items() if bool(error_nL.any())}
    if not reported:
        return 0, USUAL_STRENGTH
    votes = bounded(
        {place: {name: -of[place] for name, of in reported.items()} for place in range(len(next(iter(reported.values()))))}
    )
    sums = {place: sum(of[name] for name in sorted(of)) for place, of in votes.items()}
    best, first = (max(some, key=lambda place: sums[place]) for some in (sums, range(len(STRENGTHS))))
    if best >= len(STRENGTHS) and len(reported) > 1:
        gains = [votes[best][name] - votes[first][name] for name in sorted(reported)]
        best = best if fmean(gains) > CLEARLY * stdev(gains) / math.sqrt(len(gains)) else first
    block, strength = divmod(best, len(STRENGTHS))
    return block, STRENGTHS[strength]
