"""Closed form: each device is served the ridge regression of all other devices' samples, from the sums of each.

He et al., AFL, CVPR 2025; docs/methods/analytic.md. The letters are those of common.methods.ridge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

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
    SUM_TENSORS,
    WEIGHT,
    are_same,
    blocks_of,
    check_sums,
    is_alone_in_a_class,
    rest_of,
    sizes_of,
    solved,
    squared_error,
)
from attune.common.statistics import interval_of_mean
from attune.fedserver.core.voices import bounded
from attune.fedserver.lab.aggregators.base import MadeOfSettings, Tensors, Vault, cohort, write
from attune.fedserver.ports.blobs import Damaged

START, TOTAL, OF = "start", "total", "sums/"  # keys in the vault; OF and a client's name: its latest sums, as they count
MEMBERS = "members"  # the total as clients that are in one sum are served it
GROUPS = 10  # of clients that are left out together, to choose gamma
CLEARLY = 3.0  # standard errors by which another block must be better than the first
USUAL_STRENGTH = 1.0  # before devices have reported errors
USUAL_GAMMA = GAMMAS[len(GAMMAS) // 2]
TINY = torch.finfo(torch.float64).tiny
MOST_SOLVED = 1 << 23  # numbers of weights that are remembered


class ClosedFormSums(MadeOfSettings):
    """The newest sums of every client, their total, and the weights that follow from them.

    A client is served W without its own samples, and the strength with which it draws its own weights from W. A client with
    fewer than FEWEST samples keeps the common weights; its strength is 0. So does one that is alone in a class, once it has
    reported errors of the others' weights. A client that has handed in nothing draws its own from the common weights. W is of
    all blocks of features, each with a gamma of its own. One block predicts: the clients' errors choose it together with the
    strength. Memory: 3 + GROUPS squares of D x D numbers, and MOST_SOLVED. Sums that a round does not change are neither added
    up nor solved again.

    Where a round brings one sum of several clients (PartUpdate.members), the first such sum is the total for ever, and its
    clients take their own out of it. Later ones bring the errors of their weights.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._read: Tensors | None = None  # the total
        self._is_plain = False  # the total is of single sums, and stays so: a vault lists its keys once
        self._is_summed = False  # the total is of all sums, and was made here
        self._solved: dict[str, Tensor] = {}  # W by the total: without this client, and of all ("")

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
        return self._served("", keep=True) if TOTAL in keys else START

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Yield W without each client's samples, and the strength."""
        total = self._known()
        keys = set(self._vault.keys())
        for client in clients:
            if f"{OF}{client}" not in keys:
                yield client, self._served("")
                continue
            own_sums, is_solved = self._vault.read(f"{OF}{client}"), client in self._solved
            own_sums = own_sums if is_solved else dict(own_sums)  # of a file each is read once
            is_few = not is_solved and float(own_sums[GRAM][-1]) < FEWEST
            keep = is_few or (bool(own_sums[ERRORS].any()) and is_alone_in_a_class(total, own_sums))
            yield client, self._served("", keep=True) if keep else self._served(client, own_sums)

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
        keys = set(self._vault.keys())
        for update in counted:
            key, sums = f"{OF}{update.client}", {name: update.tensors[name] for name in (*SUM_TENSORS, ERRORS)}
            share = min(1.0, update.weight / max(float(sums[GRAM][-1]), 1.0))
            sums = {name: tensor * share for name, tensor in sums.items()} if share < 1 else sums
            self._is_summed = self._is_summed and key in keys and are_same(sums, self._vault.read(key))
            write(self._vault, key, sums)
        sizes, before = self._sizes(), self._vault.read(TOTAL) if self._is_summed else None
        if before is None:
            total, groups = self._summed()
            gammas, self._solved = _gammas(total, groups, sizes), {}
        else:
            total, gammas = {name: before[name] for name in SUM_TENSORS}, before[GAMMA].tolist()
        block, strength = _choice({key.removeprefix(OF): self._vault.read(key)[ERRORS] for key in self._keys_of_sums()})
        write(self._vault, TOTAL, total | _chosen(sizes, gammas, block, strength))
        self._read, self._is_summed = None, True
        return _figures(gammas, block, strength)

    def fit(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Keep no newcomer's sums: it draws its own weights from the common ones, which must not move."""
        return {}

    def _close_sum(self, update: PartUpdate) -> dict[str, float]:
        """Keep the one sum of several clients; or choose strengths and block by the sum of their errors."""
        who, sums = f"the sum of {len(update.members)} devices", {name: update.tensors[name] for name in (*SUM_TENSORS, ERRORS)}
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
        served[WEIGHT] = _weights(served, served)
        for key, counts in ((TOTAL, 0.0), (MEMBERS, 1.0)):
            write(self._vault, key, served | {COUNTED: torch.tensor(counts, dtype=torch.float64)})
        return _figures(gammas, block, strength)

    def _keys_of_sums(self) -> list[str]:
        return sorted(key for key in self._vault.keys() if key.startswith(OF))  # noqa: SIM118

    def _summed(self) -> tuple[Tensors, list[Tensors]]:
        """Return the total, and the sums of each group of clients."""
        total, groups = dict[str, Tensor](), list[Tensors]()
        for place, key in enumerate(self._keys_of_sums()):
            sums = self._vault.read(key)
            if place < GROUPS:
                groups.append({name: torch.zeros_like(sums[name]) for name in SUM_TENSORS})
            total = total or {name: torch.zeros_like(sums[name]) for name in SUM_TENSORS}
            for name in SUM_TENSORS:
                tensor = sums[name]
                total[name] += tensor
                groups[place % GROUPS][name] += tensor
        return total, groups

    def _known(self) -> Tensors:
        if self._read is None:
            self._read = dict(self._vault.read(TOTAL))
        return self._read

    def _served(self, client: str, own_sums: Mapping[str, Tensor] | None = None, keep: bool = False) -> Tensors:
        """Return W of the total without a client's sums (None: of all), and the choices; with `keep` the strength is 0."""
        total = self._known()
        W_CD = self._solved.get(client)
        if W_CD is None:
            W_CD = _weights(total, total if own_sums is None else rest_of(total, own_sums))
            if (1 + len(self._solved)) * W_CD.numel() <= MOST_SOLVED:
                self._solved[client] = W_CD
        return {WEIGHT: W_CD, STRENGTH: total[STRENGTH] * (not keep), BLOCK: total[BLOCK], SIZES: total[SIZES]}

    def _sizes(self) -> list[int]:
        return sizes_of(self._vault.read(START))


def earlier_sums(vault: Vault, client: str) -> Tensors:
    """Return the sums that the server holds of a client; empty: none, or a file that must be made again."""
    with suppress(KeyError, Damaged):
        return dict(vault.read(f"{OF}{client}"))
    return {}


def _weights(total: Mapping[str, Tensor], sums: Mapping[str, Tensor]) -> Tensor:
    """Return W (C, D) that follows from these sums, by the strengths of the total."""
    pairs = zip(total[GAMMA].tolist(), blocks_of(sums, sizes_of(total)), strict=True)
    return torch.cat([solved(G_DD, B_DC, gamma) for gamma, (_, G_DD, B_DC) in pairs], dim=1)


def left_out(total: Mapping[str, Tensor], sums: Iterable[tuple[str, Mapping[str, Tensor]]]) -> list[tuple[str, int, float]]:
    """Return for each client (its name, samples, misfit), the largest misfit first.

    The misfit is the squared error of all other clients' weights on the client's samples, as a share of its targets' squares:
    an answer of 0 to all has 1. Labels that contradict all others' have more; so have samples of which nobody else has any.
    It is of the block that predicts.
    """
    sizes, block, rows = sizes_of(total), int(total[BLOCK]), []
    gamma = float(total[GAMMA][block])
    for client, own_sums in sums:
        (_, own_DD, own_DC), (_, rest_DD, rest_DC) = (
            list(blocks_of(of, sizes))[block] for of in (own_sums, rest_of(total, own_sums))
        )
        squares_C, W_CD = own_sums[SQUARES], solved(rest_DD, rest_DC, gamma)
        squares = max(float(squares_C.sum()), TINY)
        misfit = squared_error(W_CD, own_DD, own_DC, squares_C) / squares
        rows.append((client, round(float(own_DD[-1, -1])), misfit))
    return sorted(rows, key=lambda row: -row[2])


def worths(total: Mapping[str, Tensor], sums: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, float, float, float]]:
    """Return for each client (its name, what it is worth to the others, low, high), the largest worth first.

    The worth is by how much the misfit of another client grows without it, as a mean over the others, with Student's interval
    for others like these. Nobody's weights are judged by samples from which they follow: at client j they are W without j, and
    without j and the client. Fewer than 3 others show no interval (NaN).
    """
    sizes, block = sizes_of(total), int(total[BLOCK])
    gamma = float(total[GAMMA][block])
    of = {client: list(blocks_of(own_sums, sizes))[block] for client, own_sums in sums.items()}

    def misfits(*without: str) -> dict[str, float]:
        rest = total
        for client in without:
            rest = rest_of(rest, sums[client])
        _, rest_DD, rest_DC = list(blocks_of(rest, sizes))[block]
        W_CD, squares = solved(rest_DD, rest_DC, gamma), {j: sums[j][SQUARES] for j in without}
        return {j: squared_error(W_CD, *of[j][1:], squares[j]) / max(float(squares[j].sum()), TINY) for j in without}

    alone = {client: misfits(client)[client] for client in of}
    gains: dict[str, list[float]] = {client: [] for client in of}
    for one, other in combinations(of, 2):
        pair = misfits(one, other)
        gains[one].append(pair[other] - alone[other])
        gains[other].append(pair[one] - alone[one])
    unknown = (math.nan, math.nan)
    ends = {
        client: (interval_of_mean(of_others) if len(of_others) > 2 else None) or unknown for client, of_others in gains.items()
    }
    rows = [(client, fmean(of_others), *ends[client]) for client, of_others in gains.items() if of_others]
    return sorted(rows, key=lambda row: -row[1])


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
    for group in groups:
        pairs = zip(blocks_of(rest_of(total, group), sizes), blocks_of(group, sizes), strict=True)
        for block, ((_, rest_DD, rest_DC), (_, own_DD, own_DC)) in enumerate(pairs):
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
