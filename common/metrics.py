"""What a device reports with the answer to an order: one struct that is sent, stored, exported, shown and drawn.

A new number is one line here and one row in docs/protocol.md. Its limits are part of its type, so a value that is not possible
is refused where the report is read.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from attune.common.errors import UpdateRefused
from attune.common.json_text import from_json
from attune.common.peer_text import clean
from attune.common.task import TaskName

MAX_COUNT = 1 << 53  # exact in every reader of JSON and CSV, and well within SQLite's integers
LARGEST = 1.7e308

Choice = Literal["personalized", "common", "local"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
Accuracy = Annotated[float, msgspec.Meta(ge=-1, le=1)]  # below 0 in regression alone: common.task
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class Metrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Accuracies are fractions of the device's own test part, or the mean score of its samples that the task has (common.task).

    None: the device has no such number.
    """

    loss: Finite | None = None  # mean training loss of the last local epoch
    accuracy_before: Accuracy | None = None  # of what was served, before local training
    accuracy_after: Accuracy | None = None  # the same after local training
    accuracy_common: Accuracy | None = None  # of the common model: what is served on a cold start
    accuracy_local: Accuracy | None = None  # of a model trained on this device alone
    accuracy_constant: Accuracy | None = None  # of no model: always the most frequent label of its training part
    better_than_common: Count | None = None  # test samples on which the device's own model does better than the common one
    worse_than_common: Count | None = None
    better_than_local: Count | None = None
    worse_than_local: Count | None = None
    gain_common: Finite | None = None  # mean of (own score - its score) over the test samples; only where scores are not 0 or 1
    error_common: Finite | None = None  # standard error of that mean
    p_common: Share | None = None  # of the paired test: fedclient.work.permutation
    gain_local: Finite | None = None
    error_local: Finite | None = None
    p_local: Share | None = None
    accuracy_kept: Accuracy | None = None  # of what the device predicts with: one of these models, or a blend of them
    kept: Choice | None = None  # which of these models the device predicts with, or counts most; evaluations only
    # Of the samples held out of training, by which models are weighed: the log-likelihood under each, in nats, summed.
    likelihood_personalized: Finite | None = None
    likelihood_common: Finite | None = None
    likelihood_local: Finite | None = None
    dial_mean: Share | None = None  # share of the attended components that stand at the common value; evaluations only
    dial_own: Share | None = None  # at the value that the device trained alone
    test_samples: Count | None = None
    seconds: Seconds | None = None  # of work on the device
    bytes_up: Count | None = None
    bytes_down: Count | None = None


ACCURACIES = tuple(name for name in Metrics.__struct_fields__ if name.startswith("accuracy_"))


def metrics_of(source: Metrics) -> Metrics:
    """The metrics alone of a struct that has further fields."""
    return Metrics(**{name: getattr(source, name) for name in Metrics.__struct_fields__})


def read_metrics(text: bytes, who: str, task: TaskName = "classes") -> Metrics:
    """A peer's report. Errors: UpdateRefused that names the number and what is wrong with it."""
    try:
        found = from_json(text, Metrics)
    except msgspec.DecodeError as error:
        raise UpdateRefused(f"{who} reports metrics that cannot be: {clean(str(error))}") from None
    for name in ACCURACIES if task != "regression" else ():
        if (value := getattr(found, name)) is not None and value < 0:
            raise UpdateRefused(f"{who} reports metrics that cannot be: {name} = {value}, which only R2 can be")
    return found
