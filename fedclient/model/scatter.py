"""Predicted against true numbers of models on test samples. N samples, K targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.pictures import figures
from attune.common.pictures.page import Cell, PageTable, Picture, Section
from attune.common.task import TASKS

Floats = npt.NDArray[np.float64]

COLUMNS = 3
SIDE = 3.4  # inches of a panel
FAINT = 200  # points from which on they are half transparent


@dataclass(frozen=True)
class Predicted:
    """One model: numbers (N, K) in the unit of y, and its federation's standard deviations (K,), by which R2 is."""

    title: str
    found: Floats
    std: Floats


def predicted(true_NK: Floats, names: Sequence[str], models: Sequence[Predicted]) -> Section:
    """A panel for each target and model, with the line on which predictions are right."""
    count = len(names) * len(models)
    columns = min(COLUMNS, count) if len(names) > 1 and len(models) == 1 else min(COLUMNS, len(models))
    rows = -(-count // columns)
    figure = figures.new(0.4 + (SIDE + 0.5) * columns, 0.6 + (SIDE + 0.5) * rows)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    drawn = [(k, model) for k in range(len(names)) for model in models]
    ends = [_ends(np.concatenate([true_NK[:, k], *(model.found[:, k] for model in models)])) for k in range(len(names))]
    table: list[list[Cell]] = []
    for axes, (k, model) in zip(grid.flat, drawn, strict=False):
        table.append(_line(model.title, names[k], true_NK[:, k], model.found[:, k], float(model.std[k])))
        _panel(axes, true_NK[:, k], model.found[:, k], names[k], ends[k])
        axes.set_title(f"{model.title}: R2 {table[-1][3]:.3f}", fontsize=10)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    caption = (
        "Each point is a test sample; on the line the prediction is right. R2 is by the federation's variance of the target, "
        f"as in status and verdicts ({TASKS['regression'].best}). The errors are in the target's own unit."
    )
    heads = ("model", "target", "samples", "R2", "mean absolute error", "root of the mean squared error", "mean error")
    picture = Picture("predicted", figures.png(figure))
    return Section("Predicted against true", caption, picture, PageTable(heads, table))


def _line(title: str, name: str, true_N: Floats, found_N: Floats, std: float) -> list[Cell]:
    error_N = found_N - true_N
    squared = float(np.square(error_N).mean())
    size, bias = float(np.abs(error_N).mean()), float(error_N.mean())
    return [title, name, len(true_N), 1 - squared / std**2, size, squared**0.5, bias]


def _ends(numbers: Floats) -> tuple[float, float]:
    """Of both axes, for all models of a target: the line is the diagonal, and models can be compared."""
    finite = numbers[np.isfinite(numbers)]
    margin = 0.04 * float(np.ptp(finite)) or 1.0
    return float(finite.min()) - margin, float(finite.max()) + margin


def _panel(axes: Any, true_N: Floats, found_N: Floats, name: str, ends: tuple[float, float]) -> None:
    axes.plot(ends, ends, color="0.6", linewidth=1, zorder=1)
    shade = 0.5 if len(true_N) > FAINT else 0.85
    axes.scatter(true_N, found_N, s=16, color=figures.BEFORE, alpha=shade, edgecolors="none", zorder=2)
    axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel=f"{name}, true", ylabel=f"{name}, predicted")
    figures.plain(axes, grid="both")
