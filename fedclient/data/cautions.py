"""Warnings about data: columns that look like identifiers, numbers that lose digits, labels that look like numbers.

N samples, F features.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attune.common.classes import INTEGER, look_alikes
from attune.common.config import TrainSettings
from attune.common.schema import Column
from attune.common.task import TaskName
from attune.common.text import listed
from attune.fedclient.data import labels, stand_ins
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.cells import EXACT, is_missing, limit_of, number_of
from attune.fedclient.data.meta import Meta
from attune.fedclient.data.stand_ins import TWO_DIGITS, has_short_year, is_compact
from attune.fedclient.data.table import DataTable

BATCH = TrainSettings().batch_size
# What people and spreadsheet programs write where they do not know. A class of such a name is said.
_PERHAPS_MISSING = re.compile(
    r"#[a-z0-9/]+[!?]|\W+|_+|\\n|\W*(missing|unknown|unbekannt|undef|undefined|nil|void|tbd|k\.? ?a\.?|n[./]?d\.?|na\.|null)\W*"
)
_NUMBERS_FOR_UNKNOWN = {-1, -9, -99, -999, -9999, 99, 999, 9999}
FEWEST_VALUES = 10  # With fewer, whole numbers that all differ say nothing
MANY_CLASSES = 20
_LOOKED_AT = 1000  # cells of a column that may be dates
_NUMBER, _FRACTION = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?"), re.compile(r"[-+]?[0-9]+\.[0-9]*[1-9]")


def of_names(table: DataTable) -> list[str]:
    """Return a note if the names of columns seem to be values, as in a file without a line of names."""
    fractions = [name for name in table.names if _FRACTION.fullmatch(name)]
    if not fractions or not all(_NUMBER.fullmatch(name) for name in table.names):
        return []
    return [
        f"the columns of {table.path} are called {listed(fractions)}, like numbers: if the first line holds values, write the "
        "names of the columns above it"
    ]


def of_long_integers(x: Array) -> list[str]:
    """Return a note if features, (N, F) integers, cannot be told apart as floats."""
    if not len(x) or int(np.abs(x.astype(np.float64)).max()) < EXACT:
        return []
    lost = [str(at) for at in range(x.shape[1]) if len(np.unique(x[:, at].astype(np.float64))) < len(np.unique(x[:, at]))]
    return [f"whole numbers of the columns {listed(lost)} have more digits than a float can hold"] if lost else []


def of_long_cells(table: DataTable, x: npt.NDArray[np.float64], names: Sequence[str]) -> list[str]:
    """Return a note if cells differ, and the features that were read from them, (N, F), do not."""
    lost = [
        name
        for column, name in zip(x.T, names, strict=True)
        if (np.abs(column) >= EXACT).any() and len(np.unique(column)) < len(set(map(str, table.cells[name])))
    ]
    return [f"numbers of {listed(lost)} have more digits than a float can hold: subtract what they share"] if lost else []


def of_features(x: npt.NDArray[np.float64], names: Sequence[str]) -> list[str]:
    """Return what is strange about features, (N, F) float64."""
    notes = []
    identifiers, shortened, constant = [], [], []
    for column, name in zip(x.T, names, strict=True):
        values = column[~np.isnan(column)]
        different = len(np.unique(values))
        if different == 1 < len(values):
            constant.append(name)
        if len(values) >= FEWEST_VALUES and different == len(values) and (values == np.trunc(values)).all():
            identifiers.append(name)
        if len(np.unique(values.astype(np.float32))) < different:
            shortened.append(name)
    if identifiers:
        notes.append(
            f"every value of {listed(identifiers)} is another whole number, as in an identifier: if it is one, a model can "
            "learn it by heart; leave it out with --apart"
        )
    notes += [f"{name} is constant: it says nothing here" for name in constant]
    numbers = {name: column[~np.isnan(column)][:_LOOKED_AT] for column, name in zip(x.T, names, strict=True)}
    if dates := [name for name, values in numbers.items() if len(values) and all(map(is_compact, values))]:
        notes.append(f"numbers of {listed(dates)} look like dates such as 20241231: --schema auto reads them as days")
    if shortened:
        notes.append(
            f"numbers of {listed(shortened)} differ only after the 7 digits that a model sees; subtract what they share"
        )
    return notes


def of_labels(table: DataTable, name: str, threshold: float | None) -> list[str]:
    """Return what is strange about the column with the classes, or with the numbers that a threshold divides into two."""
    cells = [cell for cell in table.cells[name] if not is_missing(cell, table.words)]
    if threshold is not None:
        return stand_ins.of_cells({name: cells}, {})
    notes = []
    try:
        numbers = {number_of(cell) for cell in cells}
    except ValueError:
        numbers = set()
    codes = any(isinstance(cell, str) and not INTEGER.fullmatch(cell.strip()) and "." not in cell for cell in cells)
    whole = all(number == np.trunc(number) for number in numbers)
    if numbers and not codes and (not whole or len(numbers) > max(MANY_CLASSES, len(cells) / 20)):
        notes.append(
            f"column {name!r} holds {len(numbers)} different numbers, and each is taken as a class of its own: say "
            f"--task regression if they are to be predicted as numbers, or --label '{name}>NUMBER' for two classes"
        )
    forms: dict[int, set[str]] = defaultdict(set)
    for text in {cell.strip() for cell in cells if isinstance(cell, str)}:
        if INTEGER.fullmatch(text):
            forms[int(text.partition(".")[0])].add(text)
    merged = [" and ".join(sorted(texts)) for texts in forms.values() if len(texts) > 1]
    if merged:
        notes.append(f"column {name!r}: {listed(merged)} are one class each, since they are the same whole number")
    return notes


def of_marks(classes: Sequence[int | str]) -> list[str]:
    """Return a note about classes that may stand for a missing class."""
    marks = [str(label) for label in classes if isinstance(label, str) and _PERHAPS_MISSING.fullmatch(label.casefold())]
    numbers = {int(label) for label in classes if INTEGER.fullmatch(str(label))}
    others = sorted(numbers - _NUMBERS_FOR_UNKNOWN)
    texts = len(numbers) < len(classes)
    if (texts and not others) or (others and others[0] >= 0 and len(others) > 1):
        largest = others[-1] if others else 0
        marks += [str(number) for number in sorted(numbers & _NUMBERS_FOR_UNKNOWN) if number < 0 or number > 9 * largest + 9]
    if not marks or len(marks) == len(classes):
        return []
    return [f"the classes {listed(marks)} may mean that the class is not known: if so, say --missing-words usual,{marks[0]}"]


def of_look_alikes(classes: Sequence[int | str]) -> list[str]:
    """Return which classes look alike."""
    alike = [" and ".join(map(repr, group)) for group in look_alikes(classes)]
    if not alike:
        return []
    return [f"classes look alike: {listed(alike)}. Write each class in one way; a federation refuses them otherwise"]


def of_outcomes(train_y: Array, test_y: Array, task: TaskName, names: Sequence[int | str], declared: bool) -> list[str]:
    """Return what is strange about what is to be predicted: it never changes, or values stand for nothing.

    Args:
        train_y: Of the training part, (N,) or (N, K).
        test_y: Of the test part.
        task: The task.
        names: Names of the K columns.
        declared: Whether the classes are declared.
    """
    if task == "classes":
        classes, everything = labels.distinct(train_y), labels.distinct(train_y, test_y)
        one = f"all training samples have one class, {classes[0]!r}: a model trained alone would always answer that"
        return [
            *([one] if len(classes) == 1 else []),
            *([] if declared else [*of_look_alikes(everything), *of_marks(everything)]),
        ]
    same = [f"{name} ({train_y[0, at]:g})" for at, name in enumerate(names) if len(train_y) and np.ptp(train_y[:, at]) == 0]
    notes = [f"what is to be predicted never changes in the training samples: {listed(same)}"] if same else []
    numbers = slice(0, 1 if task == "survival" else None)  # an event is 0 or 1
    return (
        notes if task == "multilabel" else [*notes, *stand_ins.of_numbers(train_y[:, numbers], list(map(str, names[numbers])))]
    )


def of_equals(table: DataTable, features: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """Return which columns that are features tell what is to be predicted."""
    return [
        f"{name} equals the label {output}: leave it out unless it is known before the label is"
        for output in outputs
        for name in features
        if name in table.cells and _are_equal(table, name, output)
    ]


def of_schema(table: DataTable, used: Mapping[str, Column], outputs: Sequence[str]) -> list[str]:
    """Return what is strange about the columns that a schema uses: one tells the label, or values stand for nothing."""
    there = sorted(name for name in used if name in table.cells)
    numeric = [name for name in there if used[name].kind in ("number", "date")]
    cells = {name: [cell for cell in table.cells[name] if not is_missing(cell, table.words)] for name in numeric}
    forms = {name: used[name].form for name in numeric if used[name].kind == "date"}
    notes = [*of_equals(table, there, outputs), *stand_ins.of_cells(cells, forms)]
    for name in numeric:
        if name not in forms and (limits := [cell for cell in cells[name] if _is_limit(cell)]):
            notes.append(
                f"{name} holds {len(limits)} values beyond a limit, such as {limits[0]}: the limit is taken as the value"
            )
    for name in there:
        words = {str(cell).strip() for cell in table.cells[name]} if used[name].kind == "category" else set()
        if marks := sorted(
            word for word in words if _PERHAPS_MISSING.fullmatch(word.casefold()) and not is_missing(word, table.words)
        ):
            notes.append(
                f"values of {name} may mean that it is not known: {listed(marks)}. If so, say --missing-words usual,{marks[0]}"
            )
    if short := [name for name in forms if any(map(has_short_year, cells[name][:_LOOKED_AT]))]:
        notes.append(f"{listed(short)}: {TWO_DIGITS}")
    return notes


def _is_limit(cell: Any) -> bool:
    try:
        limit_of(cell)
    except ValueError:
        return False
    return True


def _are_equal(table: DataTable, name: str, output: str) -> bool:
    """Return whether a column tells another one: each value goes with one value, or the numbers are in proportion."""
    pairs = [
        (str(value), str(truth))
        for value, truth in zip(table.cells[name], table.cells[output], strict=True)
        if not is_missing(value, table.words) and not is_missing(truth, table.words)
    ]
    values, truths = ({pair[side] for pair in pairs} for side in (0, 1))
    if 2 * len(pairs) < len(table) or not 1 < len(truths) == len(values) == len(set(pairs)):
        return False
    if 2 * len(truths) <= len(pairs):
        return True
    try:
        numbers = np.array([[number_of(value), number_of(truth)] for value, truth in pairs])
    except ValueError:
        return values == truths
    return bool(np.isfinite(numbers).all() and abs(np.corrcoef(numbers.T)[0, 1]) > 1 - 1e-9)


def of_parts(train_y: Array, test_y: Array, meta: Meta) -> tuple[str, ...]:
    """Return what is strange about the labels of both parts, and their sizes."""
    known = meta.classes is not None and len(meta.classes) == train_y.shape[-1]
    names = meta.classes if meta.classes and known else list(range(train_y.shape[-1]))
    notes = [] if meta.task == "custom" else of_outcomes(train_y, test_y, meta.task, names, meta.classes is not None)
    if len(train_y) < BATCH:
        notes.append(f"{len(train_y)} training samples are fewer than a batch of {BATCH}: every epoch is a single step")
    if not len(test_y):
        notes.append("there are no test samples: accuracy cannot be measured on this device")
    return tuple(notes)
