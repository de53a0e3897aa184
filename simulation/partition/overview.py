"""Overview of a partition for people: a plain table, and a picture of the class counts of every client."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np

from attune.common.errors import ShardError
from attune.common.pictures import figures
from attune.common.text import aligned
from attune.simulation.partition.samples import CLASS
from attune.simulation.partition.split import Partition

_MAX_COLUMNS = 20  # of the table; with more classes it shows only how many each client has
_MAX_CELLS = 400  # of the picture that show their number
_MAX_TICKS = 40
_MAX_LINES = 150  # between rows, and between columns: more would hide the cells
_SKEW = 20  # colours are logarithmic if the largest count is this many times the median
_MAX_ROWS = 60  # of the table; with more clients it shows the first ones and the spread of sizes


def table(parts: Partition) -> str:
    """Return a table with a line for each client: training samples of each class, and both totals.

    With many classes a line has only the number of classes. Classes of text are characters, counted at every position. With
    many clients only the first are shown.
    """
    count_NC = parts.counts()
    many = count_NC.shape[1] > _MAX_COLUMNS
    heads = ["classes"] if many else [_called(parts, c) for c in range(count_NC.shape[1])]
    rows = [["client", *heads, "train", "test"]]
    shown = len(parts.names) if len(parts.names) <= _MAX_ROWS else _MAX_ROWS // 2
    for name, count_C, train, test in list(zip(parts.names, count_NC, parts.train, parts.test, strict=True))[:shown]:
        cells = [str((count_C > 0).sum())] if many else [str(count) if count else "." for count in count_C]
        rows.append([name, *cells, str(len(train)), str(len(test))])
    hidden = len(parts.names) - shown
    more = [f"... and {hidden} more clients", _spread(parts)] if hidden else []
    return "\n".join([f"{parts.title} (training samples by class)", *aligned(rows), *more])


def _called(parts: Partition, c: int) -> str:
    names = parts.dataset.called.get(CLASS)
    return names[c] if names else str(parts.dataset.classes[c])


def _spread(parts: Partition) -> str:
    size_N = np.array([len(train) + len(test) for train, test in zip(parts.train, parts.test, strict=True)])
    low, middle, high = int(size_N.min()), float(np.median(size_N)), int(size_N.max())
    return f"{len(size_N)} clients with {int(size_N.sum())} samples: at least {low}, median {middle:g}, at most {high}"


def save_picture(parts: Partition, path: Path) -> None:
    """Write a PNG with a row for each client and a column for each class. Darker cells have more training samples.

    Raises:
        SettingError: matplotlib is not installed.
        ShardError: `path` cannot be written.
    """
    count_NC = parts.counts()
    clients, classes = count_NC.shape
    width, height = min(max(5.0, 2.2 + 0.55 * classes), 16), min(max(3.0, 1.6 + 0.34 * clients), 24)
    figure = figures.new(width, height)
    from matplotlib.colors import LogNorm, Normalize

    axes = figure.add_subplot()
    highest = max(int(count_NC.max()), 1)
    skewed = count_NC.any() and highest > _SKEW * np.median(count_NC[count_NC > 0])
    norm = LogNorm(1, highest) if skewed else Normalize(0, highest)
    image = axes.imshow(np.ma.masked_equal(count_NC, 0), cmap="YlGnBu", norm=norm, aspect="auto", interpolation="nearest")
    axes.set_title(textwrap.fill(parts.title, int(10 * width)))
    axes.set_xlabel("class")
    axes.set_ylabel("client (train + test)")
    shown_C, shown_N = (range(0, size, -(-size // _MAX_TICKS)) for size in (classes, clients))
    axes.set_xticks(shown_C, [_called(parts, c) for c in shown_C], rotation=90 if classes > _MAX_COLUMNS else 0)
    axes.set_yticks(shown_N, [f"{parts.names[n]} ({len(parts.train[n])} + {len(parts.test[n])})" for n in shown_N])
    if max(clients, classes) <= _MAX_LINES:
        axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(clients + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    if clients * classes <= _MAX_CELLS:
        for n, c in np.argwhere(count_NC):
            dark = norm(count_NC[n, c]) > 0.55
            axes.text(c, n, str(count_NC[n, c]), ha="center", va="center", fontsize=8, color="white" if dark else "black")
    what = "training positions" if parts.dataset.train_y.ndim == 2 else "training samples"
    figure.colorbar(image, ax=axes, label=f"{what} (white: none)")
    try:
        path.write_bytes(figures.png(figure))
    except OSError as error:
        raise ShardError(f"cannot write the picture {path}: {error.strerror or error}") from None
