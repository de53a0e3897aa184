"""Pictures of the relations between clients: which client learned from which, and which embeddings are close.

Shapes: S clients of a cohort, N clients with an embedding, E numbers of an embedding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError
from attune.common.pictures import figures
from attune.common.pictures.figures import Cell, PageTable, Picture, Section

Matrix = npt.NDArray[np.float64]

PANELS = 24  # components in one picture; if there are more, every n-th is shown
COLUMNS = 4
TICKS = 24  # clients whose names fit beside a panel
NAMED = 40  # clients whose names fit into the map
KEYED = 20  # groups that fit into the key
PERPLEXITY, FEWEST = 30.0, 20  # with fewer clients t-SNE shows groups that do not exist


def attention(matrices: Mapping[str, Matrix], clients: Sequence[str], groups: Mapping[str, str], when: str) -> Section:
    """Draw a panel for each component: row i has the weights with which client i's value is mixed. Groups are side by side."""
    order = sorted(range(len(clients)), key=_place(clients, groups))
    names = figures.short([clients[i] for i in order])
    kinds = [groups.get(clients[i], "") for i in order]
    sorted_SS = {unit: A_SS[np.ix_(order, order)] for unit, A_SS in matrices.items()}
    step = math.ceil(len(sorted_SS) / PANELS)
    shown = list(sorted_SS)[::step]
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure, grid = figures.grid(rows, columns, len(shown), 2.4 + 2.7 * columns, 1.2 + 2.75 * rows)
    for number, (axes, unit) in enumerate(zip(grid.flat, shown, strict=False)):
        image = axes.imshow(sorted_SS[unit], cmap="viridis", norm=_root(), interpolation="nearest")
        axes.set_title("mean of all components" if unit == "mean" else unit, fontsize=9)
        _ticks(axes, names, kinds, below=number + columns >= len(shown), left=number % columns == 0)
    figure.supylabel("client that is served", fontsize=10)
    figure.supxlabel("client it learns from", fontsize=10)
    figure.suptitle(f"Which client learns from which, {when}", fontsize=12)
    _bar(figure, grid, image, 1 / len(names))
    caption = (
        "Each row sums to one: how much of each client's value is in what the client of that row is served, one panel for each "
        "component of the model. The scale is from 0 to 1 in every picture, by square roots; an equal share is marked, here "
        f"{1 / len(names):.3g}. A panel of this one colour is plain averaging. A bright diagonal means that clients keep to "
        "themselves; bright squares are clients that learn from each other. Effective clients: how many equal shares would be "
        "spread as widely (the exponential of the entropy)."
    )
    if step > 1:
        caption += f" One of {step} components is shown; the table has them all."
    table = PageTable(
        ("component", "mean weight on oneself", "effective clients"), [_spread(u, A) for u, A in sorted_SS.items()]
    )
    return Section("Which client learns from which", caption, Picture("attention", figure), table)


def _root() -> Any:
    """Return a colour scale by the square root of a weight: the same for any number of clients, and small weights differ."""
    from matplotlib.colors import PowerNorm

    return PowerNorm(0.5, vmin=0.0, vmax=1.0)


def _bar(figure: Any, grid: Any, image: Any, equal: float) -> None:
    """Draw the colour bar with a mark at an equal share."""
    bar = figure.colorbar(image, ax=grid, label="weight", shrink=0.9, aspect=30)
    bar.set_ticks([0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0], labels=["0", "0.01", "0.05", "0.1", "0.25", "0.5", "1"])
    bar.ax.axhline(equal, color=figures.COLOURS[8], linewidth=2)
    bar.ax.annotate(
        "equal share", (0, equal), xycoords=("axes fraction", "data"), xytext=(-4, 0), textcoords="offset points",
        ha="right", va="center", fontsize=8, color=figures.COLOURS[8], rotation=90,
    )  # fmt: skip


def _place(clients: Sequence[str], groups: Mapping[str, str]) -> Any:
    """Return a sorting key for positions in `clients`: by group, then by name."""
    rank = {name: position for position, name in enumerate(figures.natural(clients))}
    kinds = {group: position for position, group in enumerate(figures.natural(set(groups.values())))}
    return lambda i: (kinds.get(groups.get(clients[i], ""), len(kinds)), rank[clients[i]])


def _ticks(axes: Any, names: Sequence[str], kinds: Sequence[str], *, below: bool, left: bool) -> None:
    """Label the axes with the clients' names if they fit, else with their groups.

    Args:
        axes: The panel.
        names: The clients' names.
        kinds: Each client's group; empty if it has none.
        below: Whether this panel has labels below it. Inner panels have none, since every label costs time.
        left: Whether this panel has labels on its left.
    """
    if len(names) <= TICKS:
        at, words = list(range(len(names))), list(names)
    else:
        spans = [(kind, [i for i, other in enumerate(kinds) if other == kind]) for kind in dict.fromkeys(kinds)]
        at, words = [sum(span) // len(span) for _, span in spans], [kind or "?" for kind, _ in spans]
        if len(spans) == 1 or len(spans) > TICKS:
            at = list(range(0, len(names), math.ceil(len(names) / TICKS)))
            words, spans = [names[i] for i in at], []
        for _, span in spans[1:]:
            axes.axhline(span[0] - 0.5, color="0.5", linewidth=0.4)
            axes.axvline(span[0] - 0.5, color="0.5", linewidth=0.4)
    axes.set_xticks(at if below else [], words if below else [], rotation=90 if max(map(len, words)) > 2 else 0, fontsize=7)
    axes.set_yticks(at if left else [], words if left else [], fontsize=7)


def _spread(unit: str, A_SS: Matrix) -> list[Cell]:
    logs_SS = np.log(np.where(A_SS > 0, A_SS, 1.0))
    entropy_S = -(A_SS * logs_SS).sum(axis=1)
    return [unit, float(A_SS.diagonal().mean()), float(np.exp(entropy_S).mean())]


def embeddings(z_NE: Matrix, clients: Sequence[str], groups: Mapping[str, str]) -> Section:
    """Draw a map of the clients' embeddings (t-SNE of van der Maaten & Hinton, 2008), coloured by group.

    Raises:
        SettingError: There are too few clients for a map, or scikit-learn is not installed.
    """
    if len(clients) < FEWEST:
        raise SettingError(
            f"a map of embeddings needs at least {FEWEST} clients, for of fewer it shows groups that are not there; "
            f"{len(clients)} were trained"
        )
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # a dependency of scikit-learn
    except ImportError:
        raise SettingError(
            "a map of embeddings needs scikit-learn, which is not installed: pip install 'attune-fl[data]'"
        ) from None
    perplexity = min(PERPLEXITY, (len(clients) - 1) / 3)
    with threadpool_limits(limits=1):  # on a busy machine, several threads take ten times as long
        at_N2 = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(z_NE.astype(np.float64))
    figure = figures.new(8.0, 6.0)
    axes = figure.add_subplot()
    _points(axes, at_N2, [groups.get(client) for client in clients])
    if len(clients) <= NAMED:
        for client, (x, y) in zip(figures.short(clients), at_N2, strict=True):
            axes.annotate(client, (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7, color="0.25")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.margins(0.12)
    axes.set_title(f"Embeddings of {len(clients)} clients (t-SNE, perplexity {perplexity:.3g})")
    caption = "Clients whose generated weights are alike lie close together; distances between far groups mean nothing."
    rows: list[list[Cell]] = [
        [client, groups.get(client), float(x), float(y)] for client, (x, y) in zip(clients, at_N2, strict=True)
    ]
    caption += " Coloured by classes." if groups else ""
    picture = Picture("embeddings", figure)
    return Section(
        "Client embeddings", caption, picture, PageTable(("client", "classes" if groups else "colour", "x", "y"), rows)
    )


def _points(axes: Any, at_N2: Matrix, groups: Sequence[str | None]) -> None:
    from matplotlib import colormaps

    kinds = figures.natural({group for group in groups if group is not None})
    if not kinds:
        axes.scatter(*at_N2.T, s=42, color=figures.BEFORE, edgecolors="white", linewidths=0.6)
        return
    map_ = colormaps["tab10" if len(kinds) <= 10 else "tab20" if len(kinds) <= 20 else "turbo"]
    counts = Counter(groups)
    for number, kind in enumerate(kinds):
        here = [i for i, group in enumerate(groups) if group == kind]
        colour = map_(number) if len(kinds) <= KEYED else map_(number / (len(kinds) - 1))
        label = f"{kind} ({counts[kind]})" if len(kinds) <= KEYED else None
        axes.scatter(*at_N2[here].T, s=42, color=[colour], edgecolors="white", linewidths=0.6, label=label)
    unknown = [i for i, group in enumerate(groups) if group is None]
    if unknown:
        axes.scatter(*at_N2[unknown].T, s=30, facecolors="none", edgecolors="0.5", label=f"unknown ({len(unknown)})")
    if len(kinds) <= KEYED:
        axes.legend(title="classes", frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
