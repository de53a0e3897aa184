"""Scheme for text with roles: a client for each role, with the beginning of its text for training and the rest for testing.

R roles, L characters in all, T characters in a window.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from attune.common.errors import SettingError
from attune.fedclient.data.makers.alphabets import CHARACTERS
from attune.simulation.partition.samples import CLASS, Corpus, Dataset, Positions
from attune.simulation.partition.schemes.cut import Cut, generator
from attune.simulation.partition.schemes.natural import folders, some
from attune.simulation.partition.schemes.scheme_settings import RolesSettings


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
