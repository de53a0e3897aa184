"""Options for reading a file: the column of the class, columns that are not features, and the task."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, nearest
from attune.common.task import TASKS, TaskName

Array = npt.NDArray[Any]
_THRESHOLD = re.compile(r"\s*(?P<name>[^<>]+?)\s*>\s*(?P<number>[-+]?\d+(?:\.\d+)?)\s*")
_MISSING = ("refuse", "median")


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading a file, checked by `of`."""

    label: str = ""  # "": the form's usual name; several of a table, with commas, where the task is not classes
    threshold: float | None = None  # two classes: label > threshold or not
    apart: tuple[str, ...] = ()  # columns that are no features, but may name clients or groups
    shape: tuple[int, ...] = ()  # of a sample; (): as in the file
    missing: Literal["refuse", "median"] = "refuse"
    columns: tuple[str, ...] = ()  # features of a table, in order; (): all that are left
    split: str = ""  # column that says of each sample whether it is for training or for testing; "": one called so, if any
    group: str = ""  # column: samples with the same value are held out together
    task: TaskName = "classes"

    @classmethod
    def of(
        cls,
        label: str = "",
        apart: Sequence[str] = (),
        shape: str = "",
        missing: str = "refuse",
        columns: str = "",
        split: str = "",
        group: str = "",
        task: str = "classes",
    ) -> ReadOptions:
        """Return the options that a user typed.

        Raises:
            SettingError: An option is wrong.
        """
        match = _THRESHOLD.fullmatch(label)
        if match is None and (">" in label or "<" in label):
            raise SettingError(f"--label takes NAME or NAME>NUMBER, not {label!r}")
        if task not in TASKS:
            raise SettingError(f"unknown task {task!r}{nearest(task, TASKS)}")
        if match is not None and task != "classes":
            raise SettingError(f"--label {label!r} makes two classes of a number: leave the number or --task {task} out")
        if shape and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){0,2}", shape):
            raise SettingError(f"--shape takes one to three sizes such as 28x28 or 32x32x3, not {shape!r}")
        if missing not in _MISSING:
            raise SettingError(f"unknown way {missing!r} to treat missing values{nearest(missing, _MISSING)}")
        return cls(
            label=match["name"] if match else label.strip(),
            threshold=float(match["number"]) if match else None,
            apart=tuple(apart),
            shape=tuple(map(int, shape.split("x"))) if shape else (),
            missing=cast(Literal["refuse", "median"], missing),
            columns=tuple(name.strip() for name in columns.split(",")) if columns else (),
            split=split,
            group=group,
            task=task,
        )

    def classes_of(self, y: Array, where: str) -> Array:
        """Return `y`, or 0 and 1 by the threshold.

        Raises:
            SettingError: There is a threshold, and the labels are no numbers.
        """
        if self.threshold is None:
            return y
        if y.dtype.kind not in "biuf":
            raise SettingError(f"--label has a number to compare with, but {self.label or 'the label'} of {where} is text")
        return np.asarray(operator.gt(y, self.threshold)).astype(np.int64)

    def labels(self) -> list[str]:
        """Return the columns of y; "" is the usual one."""
        return [name.strip() for name in self.label.split(",")] if self.task != "classes" else [self.label]


PLAIN = ReadOptions()
