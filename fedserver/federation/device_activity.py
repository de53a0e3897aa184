"""Activity of each device, as far as the server knows it: for people, in memory only.

One thread writes. Any thread may read, because it gets copies of values that never change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from attune.fedserver.core.messages import StrEnum

KEPT_SPANS = 200  # of each device
KEPT_ROUNDS = 50


class DeviceStage(StrEnum):
    """Stage of a device's work."""

    WAITING = "waiting"
    DOWNLOADING = "downloading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SENDING = "sending"
    ABSENT = "absent"
    FINISHED = "finished"


WORK = {"train": DeviceStage.TRAINING, "evaluate": DeviceStage.EVALUATING}


@dataclass(frozen=True, slots=True)
class Span:
    """Time in which a device was in `stage`: from the unix time `began_at` to that of its next span."""

    stage: DeviceStage
    began_at: float
    why: str = ""


class DeviceActivity:
    """Spans of all devices, and the times of the last closed rounds."""

    def __init__(self, unix: Callable[[], float]) -> None:
        self._unix = unix
        self._spans: dict[str, tuple[Span, ...]] = {}  # an idle device has one: a deque would take 700 bytes of each
        self._closed: deque[tuple[int, float]] = deque(maxlen=KEPT_ROUNDS)

    def enter(self, name: str, stage: DeviceStage, why: str = "") -> None:
        """Note that the device is in this stage now. Entering the same stage again changes only the reason."""
        spans = self._spans.get(name, ())
        if spans and spans[-1].stage is stage and why in ("", spans[-1].why):
            return
        self._spans[name] = (*spans[1 - KEPT_SPANS :], Span(stage, self._unix(), why))

    def stage(self, name: str) -> DeviceStage | None:
        """Return the stage of the device, or None if this process has not seen it."""
        return self._spans[name][-1].stage if name in self._spans else None

    def close_round(self, number: int) -> None:
        self._closed.append((number, self._unix()))

    @property
    def spans(self) -> dict[str, tuple[Span, ...]]:
        """Spans of each device that this process has seen, oldest first."""
        return dict(self._spans)

    def round_s(self) -> float | None:
        """Return the mean seconds of the last rounds, or None before two were closed."""
        closed = tuple(self._closed)
        return (closed[-1][1] - closed[0][1]) / (len(closed) - 1) if len(closed) > 1 else None
