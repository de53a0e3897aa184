"""Schemes for natural clients, so that the split is not drawn: persons, hospitals or writers of samples, and roles of a text.

R roles, L characters in all, T characters in a window.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from attune.common.errors import SettingError
from attune.fedclient.data.makers.alphabets import CHARACTERS
from attune.simulation.partition.samples import CLASS, Corpus, Dataset, Positions
from attune.simulation.partition.schemes.cut import Cut, generator, grouped, stratified
from attune.simulation.partition.schemes.scheme_settings import NaturalSettings, RolesSettings

_FOREIGN = re.compile(r"[^a-z0-9]+")
_LONGEST = 40


def natural(data: Dataset, clients: int | None, settings: NaturalSettings, seed: int) -> Cut:
    """Divide a data set into a client for each value of `by`; with `clients`, that many of them, drawn at random.

    The test part of a client is the given one, or a share of its samples: random ones in equal proportions of every class, the
    last ones ("time"), or whole groups.

    Raises:
        SettingError: An array is not there, or too few clients are left.
    """
    whose = _complete(data, settings.by)
    together = settings.group or data.group
    group = _complete(data, together) if together else None
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
    return Cut(data, train, test, folders(names), notes, together)


def _complete(data: Dataset, name: str) -> npt.NDArray[np.generic]:
    """Return a label array of which every sample has a value.

    Raises:
        SettingError: Some have none, or there is no such array.
    """
    values = data.further(name)
    if count := int(np.sum((values != values) | (values.astype(str) == ""))):
        raise SettingError(f"{count} samples of {data.name} have nothing in {name!r}: leave them out, or name what they have")
    return values


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


def roles(text: Corpus, clients: int | None, settings: RolesSettings, seed: int) -> Cut:
    """Divide a text into windows of T characters.

    The label is the character after each position, (N, T), or after the last one only, (N,). No window and no label crosses
    the border between the two parts or between roles. Roles without a window in both parts are left out. With `clients`, that
    many of the others are drawn at random. The position of a sample is the start of its window in the corpus. The arrays are
    views, so memory is used only for samples that are taken.

    Raises:
        SettingError: No role is left, or too few.
    """
    stride = settings.stride or (settings.window if settings.target == "each" else 1)
    usable: list[tuple[str, Positions, Positions]] = []
    for role, start, end in zip(text.roles, text.starts[:-1], text.starts[1:], strict=True):
        border = start + int((end - start) * settings.train + 1e-9)
        train, test = (_windows(a, b, settings.window, stride) for a, b in ((start, border), (border, end)))
        if end - start >= settings.at_least and len(train) and len(test):
            usable.append((role, train, test))
    left_out = len(text) - len(usable)
    notes = (f"{left_out} of {len(text)} roles are left out: too little text for a window in both parts.",) if left_out else ()
    if not usable:
        raise SettingError(
            f"no role of {text.name} has enough text for windows of {settings.window} characters in both parts; "
            "take a smaller --set window, or at_least"
        )
    kept = some(len(usable), clients, generator(seed, "roles"), "with enough text")
    names, train_parts, test_parts = zip(*(usable[place] for place in kept), strict=True)
    return Cut(_dataset(text, settings), train_parts, test_parts, folders(names), notes)


def _windows(start: int, end: int, window: int, stride: int) -> Positions:
    return np.arange(start, end - window, stride, dtype=np.int64)


def _dataset(text: Corpus, settings: RolesSettings) -> Dataset:
    x = sliding_window_view(text.tokens, settings.window)[:-1]
    after = text.tokens[1:]
    y = sliding_window_view(after, settings.window) if settings.target == "each" else text.tokens[settings.window :]
    size, names = len(CHARACTERS), {CLASS: [repr(character) for character in CHARACTERS]}
    return Dataset(text.name, "tokens", x, y, x[:0], y[:0], list(range(size)), size, called=names)
