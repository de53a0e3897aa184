"""Pictures of models on test samples: where they look, which class they label as which, and the accuracy of each class.

h x w patches, N images, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attune.common.errors import SettingError
from attune.common.models.blocks import SelfAttention
from attune.common.models.structure import roles
from attune.common.models.vit import VisionTransformer
from attune.common.pictures import figures
from attune.common.pictures.figures import Cell, PageTable, Picture, Section
from attune.common.statistics import wilson
from attune.common.task import TASKS
from attune.fedclient.work.task_measures import overlap

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.int64]

NUMBERED = 20  # classes up to which a confusion matrix has its counts written in
COLUMNS = 3
ENOUGH = 2.0  # equal shares: the colour scale reaches at least so far, so that an even map looks even


class RolloutPanel(msgspec.Struct, frozen=True):
    """One model's rollout: maps (N, h, w), and the label that it predicts for each image."""

    title: str
    maps: npt.NDArray[np.float64]
    predicted: Sequence[str]


def rollouts(images: Floats, numbers: Sequence[int], true: Sequence[str], looks: Sequence[RolloutPanel]) -> Section:
    """Draw images (N, H, W, channels) in a row, and below them a row for each model, brighter where it looks."""
    figure = figures.new(1.3 + 1.5 * len(images), 0.4 + 1.85 * (1 + len(looks)))
    grid: Any = figure.subplots(1 + len(looks), len(images), squeeze=False)
    for n, axes in enumerate(grid[0]):
        axes.imshow(_shown(images[n]), cmap="gray", vmin=0, vmax=1)
        axes.set_title(true[n], fontsize=10)
    most = max(ENOUGH, *(float(_in_shares(map_hw).max()) for look in looks for map_hw in look.maps))
    for row, look in zip(grid[1:], looks, strict=True):
        for n, axes in enumerate(row):
            drawn = _overlay(axes, images[n], _in_shares(look.maps[n]), most)
            right = look.predicted[n] == true[n]
            axes.set_title(look.predicted[n], fontsize=10, color="black" if right else figures.COLOURS[8])
    for axes in grid.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    for axes, label in zip(grid[:, 0], ["test image", *(look.title for look in looks)], strict=True):
        axes.set_ylabel(label, fontsize=10)
    bar = figure.colorbar(drawn, ax=grid, label="attention, in equal shares", shrink=0.8, aspect=30)
    bar.ax.axhline(1.0, color="white", linewidth=2)  # an equal share
    figure.suptitle("Attention rollout", fontsize=12)
    caption = (
        f"How much of each patch has reached the class token: over the layers, the maximum over heads, without the lowest "
        f"{DISCARDED:.0%} of a layer's weights. Bright: much, on one scale for all pictures, where 1 is an equal share (the "
        "white line). Above each picture the true label, and what the model took it "
        "for (red: wrong). Patches in effect: how many equal shares would be spread as widely."
    )
    heads = ["test sample", "label", *(f"{look.title}: {what}" for look in looks for what in ("label", "patches in effect"))]
    rows: list[list[Cell]] = [
        [numbers[n], true[n], *(cell for look in looks for cell in (look.predicted[n], effective(look.maps[n])))]
        for n in range(len(images))
    ]
    return Section("Where the model looks", caption, Picture("rollout", figure), PageTable(heads, rows))


def areas(images: Floats, numbers: Sequence[int], true: Ints, answers: Mapping[str, Ints], names: Sequence[str]) -> Section:
    """Draw images (N, H, W, channels) in a row, and below them their labels (N, H, W): the true ones, and each model's."""
    rows = {"truth": true, **answers}
    figure = figures.new(1.3 + 1.5 * len(images), 0.4 + 1.7 * (1 + len(rows)))
    grid: Any = figure.subplots(1 + len(rows), len(images), squeeze=False)
    for n, axes in enumerate(grid[0]):
        axes.imshow(_shown(images[n]), cmap="gray", vmin=0, vmax=1)
        axes.set_title(str(numbers[n]), fontsize=10)
    for line, area_NHW in zip(grid[1:], rows.values(), strict=True):
        for n, axes in enumerate(line):
            axes.imshow(_shown(images[n]), cmap="gray", vmin=0, vmax=1)
            shown = np.ma.masked_equal(area_NHW[n], 0)
            axes.imshow(shown, cmap="tab10", alpha=0.6, interpolation="nearest", vmin=0, vmax=max(10, len(names)))
    for axes in grid.flat:
        axes.set_xticks([])
        axes.set_yticks([])
    for axes, label in zip(grid[:, 0], ["test image", *rows], strict=True):
        axes.set_ylabel(label, fontsize=10)
    caption = (
        f"Test images, by number, with the areas of {', '.join(names[1:])} in colour: the true ones, and below them what each "
        f"model found. {names[0]} is the background. Images that show something come before others."
    )
    scores = {title: overlap(torch.from_numpy(said), torch.from_numpy(true), False).tolist() for title, said in answers.items()}
    cells: list[list[Cell]] = [[number, *(score[n] for score in scores.values())] for n, number in enumerate(numbers)]
    table = PageTable(["test sample", *(f"{title}: Dice" for title in scores)], cells)
    return Section("Areas", caption, Picture("areas", figure), table)


def _shown(image_HWC: Floats) -> Floats:
    """Return an image as matplotlib takes it, within 0 and 1; it is stretched only if values lie outside."""
    low, high = min(0.0, float(image_HWC.min())), max(1.0, float(image_HWC.max()))
    scaled = (image_HWC - low) / (high - low)
    return scaled if image_HWC.shape[-1] == 3 else scaled.mean(axis=-1)


def _in_shares(map_hw: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a map in multiples of an equal share, so that its mean is 1."""
    return np.asarray(map_hw * (map_hw.size / map_hw.sum()))


def _overlay(axes: Any, image_HWC: Floats, map_hw: npt.NDArray[np.float64], most: float) -> Any:
    """Draw an image under its map. The map covers whole patches, also where they reach beyond the image."""
    height, width = image_HWC.shape[:2]
    rows, columns = map_hw.shape
    patch = max(-(-height // rows), -(-width // columns))
    axes.imshow(_shown(image_HWC), cmap="gray", vmin=0, vmax=1)
    extent = (-0.5, columns * patch - 0.5, rows * patch - 0.5, -0.5)
    drawn = axes.imshow(map_hw, cmap="inferno", alpha=0.6, extent=extent, interpolation="bicubic", vmin=0, vmax=most)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)
    return drawn


def effective(map_hw: npt.NDArray[np.float64]) -> float:
    """Return the exponential of the entropy of the map's shares."""
    share = map_hw.flatten() / map_hw.sum()
    share = share[share > 0]
    return float(np.exp(-(share * np.log(share)).sum()))


def confusions(counts: Sequence[tuple[str, Ints]], names: Sequence[str]) -> Section:
    """Draw a panel per model: rows are true labels, columns predicted ones, coloured by the share of the row."""
    columns = min(COLUMNS, len(counts))
    rows = -(-len(counts) // columns)
    side = min(max(2.6, 0.42 * len(names) + 1.2), 7.0)
    figure, grid = figures.grid(rows, columns, len(counts), 0.8 + (side + 0.2) * columns, 0.6 + (side + 0.3) * rows)
    for axes, (title, count_CC) in zip(grid.flat, counts, strict=False):
        share_CC = count_CC / np.maximum(count_CC.sum(axis=1, keepdims=True), 1)
        axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
        right, total = int(count_CC.trace()), int(count_CC.sum())
        axes.set_title(f"{title}: {right} of {total} right ({right / total:.1%})", fontsize=10)
        step = -(-len(names) // NUMBERED)
        ticks, words = range(0, len(names), step), names[::step]
        axes.set_xticks(ticks, words, rotation=90 if max(map(len, names)) > 3 else 0, fontsize=8)
        axes.set_yticks(ticks, words, fontsize=8)
        axes.set_xlabel("found")
        axes.set_ylabel("true")
        if len(names) <= NUMBERED:
            for i, k in np.argwhere(count_CC):
                colour = "white" if share_CC[i, k] > 0.55 else "black"
                axes.text(k, i, str(count_CC[i, k]), ha="center", va="center", fontsize=8, color=colour)
    caption = "How many test samples of each label (rows) were taken for which (columns). Darker: a larger share of the row."
    table: list[list[Cell]] = [
        [title, names[i], names[k], int(count_CC[i, k])] for title, count_CC in counts for i, k in np.argwhere(count_CC)
    ]
    picture = Picture("confusion", figure)
    return Section("What is taken for what", caption, picture, PageTable(("model", "true", "found", "samples"), table))


def by_class(shares: Sequence[tuple[str, Sequence[tuple[int, int]]]], names: Sequence[str], word: str = "class") -> Section:
    """Draw bars with 95 % intervals for each model (title, (right, samples) of each class or label)."""
    wide = max(map(len, names)) > 6 or len(names) > 20
    figure = figures.new(min(max(5.0, 2.0 + 0.35 * len(names) * (1 + len(shares))), 14.0), 4.2)
    axes = figure.add_subplot()
    thick = 0.8 / len(shares)
    rows: list[list[Cell]] = []
    for number, (title, counts) in enumerate(shares):
        at = [k - 0.4 + thick * (number + 0.5) for k in range(len(names))]
        value_C = np.array([right / total for right, total in counts])
        interval_C2 = np.array([wilson(right / total, total) for right, total in counts])
        colour = figures.COLOURS[number % len(figures.COLOURS)]
        axes.bar(at, value_C, width=thick, color=colour, label=title)
        reach = np.clip([value_C - interval_C2[:, 0], interval_C2[:, 1] - value_C], 0, None)
        axes.errorbar(at, value_C, yerr=reach, fmt="none", ecolor="0.25", elinewidth=0.9, capsize=2)
        for name, (right, total), value, (low, high) in zip(names, counts, value_C, interval_C2, strict=True):
            rows.append([title, name, total, right, float(value), f"{low:.3f}-{high:.3f}"])
    axes.set_xticks(range(len(names)), names, rotation=90 if wide else 0)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel(word)
    axes.set_ylabel("accuracy, 95 % interval")
    axes.set_title(f"Accuracy by {word}", pad=24)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=min(4, len(shares)), borderaxespad=0.1)
    figures.plain(axes)
    of = "Of the test samples of each class, the share that is labelled correctly"
    of = of if word == "class" else "Of all test samples, the share for which each label is answered correctly, there or not"
    caption = f"{of}, with Wilson's interval."
    table = PageTable(("model", word, "samples", "right", "accuracy", "95 %"), rows)
    name = "classes" if word == "class" else "labels"
    return Section(f"Accuracy by {word}", caption, Picture(name, figure), table)


SIDE = 3.4  # inches of a panel
FAINT = 200  # points from which on they are half transparent


class Predicted(msgspec.Struct, frozen=True):
    """One model: numbers (N, K) in the unit of y, and its federation's standard deviations (K,), by which R2 is."""

    title: str
    numbers: Floats
    std: Floats


def predicted(true_NK: Floats, names: Sequence[str], models: Sequence[Predicted]) -> Section:
    """Draw a panel for each target and model, with the line on which predictions are right."""
    count = len(names) * len(models)
    columns = min(COLUMNS, count) if len(names) > 1 and len(models) == 1 else min(COLUMNS, len(models))
    rows = -(-count // columns)
    figure, grid = figures.grid(rows, columns, count, 0.4 + (SIDE + 0.5) * columns, 0.6 + (SIDE + 0.5) * rows)
    drawn = [(k, model) for k in range(len(names)) for model in models]
    ends = [_ends(np.concatenate([true_NK[:, k], *(model.numbers[:, k] for model in models)])) for k in range(len(names))]
    table: list[list[Cell]] = []
    for axes, (k, model) in zip(grid.flat, drawn, strict=False):
        table.append(_line(model.title, names[k], true_NK[:, k], model.numbers[:, k], float(model.std[k])))
        _panel(axes, true_NK[:, k], model.numbers[:, k], names[k], ends[k])
        axes.set_title(f"{model.title}: R2 {table[-1][3]:.3f}", fontsize=10)
    caption = (
        "Each point is a test sample; on the line the prediction is right. R2 is by the federation's variance of the target, "
        f"as in status and verdicts ({TASKS['regression'].best}). The errors are in the target's own unit."
    )
    heads = ("model", "target", "samples", "R2", "mean absolute error", "root of the mean squared error", "mean error")
    picture = Picture("predicted", figure)
    return Section("Predicted against true", caption, picture, PageTable(heads, table))


def _line(title: str, name: str, true_N: Floats, found_N: Floats, std: float) -> list[Cell]:
    error_N = found_N - true_N
    squared = float(np.square(error_N).mean())
    size, bias = float(np.abs(error_N).mean()), float(error_N.mean())
    return [title, name, len(true_N), 1 - squared / std**2, size, squared**0.5, bias]


def _ends(numbers: Floats) -> tuple[float, float]:
    """Return the ends of both axes for all models of a target, so that the line is the diagonal and models can be compared."""
    finite = numbers[np.isfinite(numbers)]
    margin = 0.04 * float(np.ptp(finite)) or 1.0
    return float(finite.min()) - margin, float(finite.max()) + margin


def _panel(axes: Any, true_N: Floats, found_N: Floats, name: str, ends: tuple[float, float]) -> None:
    axes.plot(ends, ends, color="0.6", linewidth=1, zorder=1)
    shade = 0.5 if len(true_N) > FAINT else 0.85
    axes.scatter(true_N, found_N, s=16, color=figures.BEFORE, alpha=shade, edgecolors="none", zorder=2)
    axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel=f"{name}, true", ylabel=f"{name}, predicted")
    figures.plain(axes, grid="both")


DISCARDED = 0.3  # of the weights of a layer: the lowest, as FedTP has it


def attentions(model: nn.Module, run: Callable[[], object]) -> list[Tensor]:
    """Return the weights (B, H, T, T) of every self-attention that `run` passes through, in that order.

    Raises:
        SettingError: The model has no attention, or attention of an unknown kind.
    """
    paths = list(dict.fromkeys(name.rpartition(".")[0] for name, its_roles in roles(model).items() if "qkv" in its_roles))
    owners = [model.get_submodule(path.rpartition(".")[0]) for path in paths]
    who = f"the model {type(model).__name__}"
    if not owners:
        raise SettingError(f"{who} has no attention: a rollout needs a Transformer, such as vit")
    if not all(isinstance(owner, SelfAttention) for owner in owners):
        raise SettingError(f"{who} has attention of an unknown kind: a rollout needs a built-in model")
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: object, qkv_BTF: Tensor) -> None:
        seen.append(owner_of[module].weights(qkv_BTF))

    owner_of: dict[nn.Module, SelfAttention] = {owner.to_qkv: owner for owner in owners if isinstance(owner, SelfAttention)}
    handles = [projection.register_forward_hook(look) for projection in owner_of]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def rollout(layers: Sequence[Tensor], discarded: float = DISCARDED) -> Tensor:
    """Return how much of each input position is in each output position, (B, T, T) float64.

    For each layer's weights (B, H, T, T): take the maximum over heads, set the lowest share `discarded` of an image's weights
    to 0, add the identity for the residual path, and normalise rows. The layers are multiplied, the last on the left.
    """
    _, _, steps, _ = layers[0].shape
    identity_TT = torch.eye(steps, dtype=torch.float64)
    rolled_BTT = identity_TT.expand(len(layers[0]), -1, -1)
    for A_BHTT in layers:
        fused_BX = A_BHTT.double().cpu().amax(dim=1).flatten(start_dim=1)
        lowest_BX = fused_BX.argsort(dim=1, stable=True)[:, : int(discarded * steps * steps)]
        kept_BTT = fused_BX.scatter(1, lowest_BX, 0.0).view(-1, steps, steps) + identity_TT
        rolled_BTT = kept_BTT / kept_BTT.sum(dim=-1, keepdim=True) @ rolled_BTT
    return rolled_BTT


def over_patches(model: nn.Module, height: int, width: int, run: Callable[[], object]) -> Tensor:
    """Return how much of each patch is in the class token after the last layer, (B, h, w) float64, for images of this size.

    `run` passes the images through the model.

    Raises:
        SettingError: As in `attentions`, or the model has no class token.
    """
    layers = attentions(model, run)
    if not isinstance(model, VisionTransformer):
        raise SettingError(f"the model {type(model).__name__} has no class token: a rollout over images needs a vit")
    rows, columns = -(-height // model.patch), -(-width // model.patch)
    return rollout(layers)[:, 0, 1:].view(-1, rows, columns)
