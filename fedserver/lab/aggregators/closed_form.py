"""Closed form: each device is served the ridge regression of all other devices' samples, from the sums of each.

He et al., AFL, CVPR 2025; docs/methods/analytic.md. The letters are those of common.methods.ridge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from attune.common.errors import UpdateRefused
from attune.common.exchange.transform import NotASum, PartUpdate
from attune.common.methods.ridge import (
    COUNTED,
    CROSS,
    ERRORS,
    FEWEST,
    GAMMA,
    GAMMAS,
    GRAM,
    SQUARES,
    STRENGTH,
    STRENGTHS,
    WEIGHT,
    check_sums,
    solved,
    squared_error,
    whole,
)
from attune.common.methods.settings.aggregators import ClosedFormSettings
from attune.fedserver.core.voices import bounded
from attune.fedserver.lab.aggregators.base import IN_TURN, Carrier, Tensors, Vault, cohort, write

START, TOTAL, OF = "start", "total", "sums/"  # keys in the vault; OF and a client's name: its latest sums, as they count
MEMBERS = "members"  # the total as clients that are in one sum are served it
SUMMED = (GRAM, CROSS, SQUARES)
GROUPS = 10  # of clients that are left out together, to choose gamma
USUAL_STRENGTH = 1.0  # before devices have reported errors
USUAL_GAMMA = GAMMAS[len(GAMMAS) // 2]


class ClosedFormSums:
    """The newest sums of every client, their total, and the weights that follow from them.

    A client is served W without its own samples, and the strength with which it draws its own weights from W. A client with
    fewer than FEWEST samples keeps the common weights; its strength is 0. A client that has handed in nothing is served the
    common weights, and draws its own from them. Memory: 3 + GROUPS squares of D x D numbers.

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
        self._read: tuple[Tensor, Tensors] | None = None  # G of the total, and all of it
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
            weights = self._vault.read(TOTAL)
            return {name: weights[name] if name == WEIGHT else torch.zeros_like(weights[name]) for name in weights}
        return self._served(*self._known(), strength=0.0) if TOTAL in keys else START

    def generate(self, clients: Sequence[str]) -> Iterator[tuple[str, Tensors]]:
        """Yield W without each client's samples, and the strength."""
        G_DD, total = self._known()
        keys = set(self._vault.keys())
        for client in clients:
            if f"{OF}{client}" not in keys:
                yield client, self._served(G_DD, total, float(total[STRENGTH]))
                continue
            own_sums = self._vault.read(f"{OF}{client}")
            own_DD = whole(own_sums[GRAM], len(G_DD))
            if float(own_DD[-1, -1]) < FEWEST:
                yield client, self._served(G_DD, total, 0.0)
            else:
                yield (
                    client,
                    self._served(G_DD - own_DD, total | {CROSS: total[CROSS] - own_sums[CROSS]}, float(total[STRENGTH])),
                )

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
        gamma, strength = _gamma(total, groups), _strength(errors)
        strengths = {GAMMA: torch.tensor(gamma, dtype=torch.float64), STRENGTH: torch.tensor(strength, dtype=torch.float64)}
        write(self._vault, TOTAL, total | strengths)
        self._read = None
        return {GAMMA: gamma, STRENGTH: strength}

    def fit(self, updates: Sequence[PartUpdate]) -> dict[str, float]:
        """Keep no newcomer's sums: it draws its own weights from the common ones, which must not move."""
        return {}

    def _close_sum(self, update: PartUpdate) -> dict[str, float]:
        """Keep the one sum of several clients; or choose the strengths by the sum of their errors."""
        who, sums = f"the sum of {len(update.members)} devices", {name: update.tensors[name] for name in (*SUMMED, ERRORS)}
        try:
            check_sums(sums, False, who)
        except UpdateRefused as refusal:
            raise NotASum(f"{refusal}. One of them has handed in something else, and nobody knows which") from None
        is_first, by_gamma = MEMBERS not in self._vault.keys(), dict(zip(GAMMAS, sums[ERRORS].tolist(), strict=True))  # noqa: SIM118
        if not (float(sums[GRAM][-1]) if is_first else any(map(any, by_gamma.values()))):
            return {}
        for client in update.members if is_first else ():
            write(self._vault, f"{OF}{client}", {COUNTED: torch.ones((), dtype=torch.float64)})
        gamma = USUAL_GAMMA if is_first else min(GAMMAS, key=lambda gamma: by_gamma[gamma][0])
        strength = _strength({who: by_gamma[gamma][1:]})
        total = sums if is_first else self._vault.read(TOTAL)
        served = {GRAM: total[GRAM], CROSS: total[CROSS], GAMMA: torch.tensor(gamma, dtype=torch.float64)}
        served |= self._served(whole(served[GRAM], len(served[CROSS])), served, strength)
        for key, counts in ((TOTAL, 0.0), (MEMBERS, 1.0)):
            write(self._vault, key, served | {COUNTED: torch.tensor(counts, dtype=torch.float64)})
        return {GAMMA: gamma, STRENGTH: strength}

    def _summed(self) -> tuple[Tensors, list[Tensors], dict[str, list[float]]]:
        """Return the total, the sums of each group of clients, and each client's errors."""
        total, groups, errors = dict[str, Tensor](), list[Tensors](), dict[str, list[float]]()
        for place, key in enumerate(sorted(key for key in self._vault.keys() if key.startswith(OF))):  # noqa: SIM118
            sums = self._vault.read(key)
            if place < GROUPS:
                groups.append({name: torch.zeros_like(sums[name]) for name in SUMMED})
            for name in SUMMED:
                tensor = sums[name]
                total[name] = total.get(name, torch.zeros_like(tensor)) + tensor
                groups[place % GROUPS][name] += tensor
            errors[key.removeprefix(OF)] = sums[ERRORS].tolist()
        return total, groups, errors

    def _known(self) -> tuple[Tensor, Tensors]:
        if self._read is None:
            total = dict(self._vault.read(TOTAL))
            self._read = whole(total[GRAM], len(total[CROSS])), total
        return self._read

    def _served(self, G_DD: Tensor, sums: Mapping[str, Tensor], strength: float) -> Tensors:
        W_CD = solved(G_DD, sums[CROSS], float(sums[GAMMA]))
        return {WEIGHT: W_CD, STRENGTH: torch.tensor(strength, dtype=torch.float64)}


def left_out(total: Mapping[str, Tensor], sums: Iterable[tuple[str, Mapping[str, Tensor]]]) -> list[tuple[str, int, float]]:
    """Return for each client (its name, samples, misfit), the largest misfit first.

    The misfit is the squared error of all other clients' weights on the client's samples, as a share of its targets' squares:
    an answer of 0 to all has 1. Labels that contradict all others' have more; so have samples of which nobody else has any.
    """
    G_DD, gamma, rows = whole(total[GRAM], len(total[CROSS])), float(total[GAMMA]), []
    for client, own_sums in sums:
        own_DD, own_DC, squares_C = whole(own_sums[GRAM], len(G_DD)), own_sums[CROSS], own_sums[SQUARES]
        W_CD = solved(G_DD - own_DD, total[CROSS] - own_DC, gamma)
        squares = max(float(squares_C.sum()), torch.finfo(torch.float64).tiny)
        misfit = squared_error(W_CD, own_DD, own_DC, squares_C) / squares
        rows.append((client, round(float(own_DD[-1, -1])), misfit))
    return sorted(rows, key=lambda row: -row[2])


def _gamma(total: Tensors, groups: Sequence[Tensors]) -> float:
    """Return the strength with the least squared error on groups of clients that are left out; of one client the middle."""
    if len(groups) < 2:
        return USUAL_GAMMA
    errors = dict.fromkeys(GAMMAS, 0.0)
    size = len(total[CROSS])
    G_DD = whole(total[GRAM], size)
    for group in groups:
        own_DD, rest_DC = whole(group[GRAM], size), total[CROSS] - group[CROSS]
        for gamma in GAMMAS:
            W_CD = solved(G_DD - own_DD, rest_DC, gamma)
            errors[gamma] += squared_error(W_CD, own_DD, group[CROSS], group[SQUARES])
    return min(errors, key=lambda gamma: errors[gamma])


def _strength(errors: Mapping[str, Sequence[float]]) -> float:
    """Return the strength with the least error over the clients, none of which has more than a bounded vote."""
    reported = {client: of for client, of in errors.items() if any(of)}
    if not reported:
        return USUAL_STRENGTH
    votes = bounded({strength: {name: -of[place] for name, of in reported.items()} for place, strength in enumerate(STRENGTHS)})
    sums = {strength: sum(of[name] for name in sorted(of)) for strength, of in votes.items()}
    return max(sums, key=lambda strength: sums[strength])
