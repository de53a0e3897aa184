"""Scheme for natural clients: a column or label array names the client of each sample, so the split is not drawn."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError
from attune.simulation.partition.samples import Dataset, Positions
from attune.simulation.partition.schemes.cut import Cut, generator, grouped, stratified
from attune.simulation.partition.schemes.scheme_settings import NaturalSettings

_FOREIGN = re.compile(r"[^a-z0-9]+")
_LONGEST = 40


def natural(data: Dataset, clients: int | None, settings: NaturalSettings, seed: int) -> Cut:
    """Divide a data set into a client for each value of `by`; with `clients`, that many of them, drawn at random.

    The test part of a client is the given one, or a share of its samples: random ones in equal proportions of every class, the
    last ones ("time"), or whole groups.

    Raises:
        SettingError: An array is not there, or too few clients are left.
    """
    whose = data.further(settings.by)
    group = data.further(settings.group) if settings.group else None
    split = settings.split if settings.split != "auto" else ("given" if len(data.test_y) else "random")
    if split == "given" and not len(data.test_y):
        raise SettingError(f"data set {data.name} has no test part, so no split is given; set split to random or time")
    index = data.class_indices()
    usable: list[tuple[str, Positions, Positions]] = []
    values = np.unique(whose)
    for value in values:
        here = np.flatnonzero(whose == value)
        rng = generator(seed, "natural", str(value))
        mask = here >= len(data.train_y)
        if split != "given":
            mask = _test_part(index[here], None if group is None else group[here], split, settings.test, rng)
        if len(here) >= settings.at_least and mask.any() and not mask.all():
            usable.append((_called(data, settings.by, value), here[~mask], here[mask]))
    notes = _notes(len(values), len(usable), settings)
    if not usable:
        raise SettingError(f"no client of {data.name} by {settings.by!r} can be used. {' '.join(notes)}")
    kept = some(len(usable), clients, generator(seed, "natural"), f"by {settings.by!r}")
    names, train, test = zip(*(usable[place] for place in kept), strict=True)
    return Cut(data, train, test, folders(names), notes, settings.group)


def _test_part(
    y: Positions, group: npt.NDArray[np.generic] | None, split: str, share: float, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    if split == "random":
        return stratified(y, share, rng) if group is None else grouped(y, group, share, rng)
    last = np.arange(len(y)) >= int((1 - share) * len(y) + 1e-9)
    if group is None or not len(y):
        return last
    # A group on both sides of the border goes to the training part as a whole.
    return last & ~np.isin(group, group[~last])


def _called(data: Dataset, by: str, value: np.generic) -> str:
    plain = value.item()
    if not isinstance(plain, int):
        return str(plain)
    names = data.called.get(by, [])
    return names[plain] if 0 <= plain < len(names) else f"{by}{int(plain)}"


def _notes(there: int, used: int, settings: NaturalSettings) -> tuple[str, ...]:
    if used == there:
        return ()
    return (f"{there - used} of {there} clients are left out: fewer than {settings.at_least} samples, or none in one part.",)


def some(there: int, wanted: int | None, rng: np.random.Generator, what: str) -> list[int]:
    """Return all places 0..there-1, or `wanted` of them at random, in order.

    Raises:
        SettingError: There are fewer than `wanted`.
    """
    if wanted is None:
        return list(range(there))
    if wanted > there:
        raise SettingError(f"--clients is {wanted}, but {what} there are {there} clients; leave --clients out to take all")
    return sorted(rng.permutation(there)[:wanted].tolist())


def folders(names: Iterable[str]) -> tuple[str, ...]:
    """Return folder names for clients, all different: shard-NAME in lower case."""
    made: dict[str, None] = {}
    for name in names:
        base = "shard-" + (_FOREIGN.sub("-", name.lower()).strip("-")[:_LONGEST] or "client")
        label, number = base, 1
        while label in made:
            number += 1
            label = f"{base}-{number}"
        made[label] = None
    return tuple(made)
