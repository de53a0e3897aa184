"""The plain loss: cross-entropy."""

from __future__ import annotations

from common.objectives.base import LocalTask, Objective, Trained
from common.objectives.descent import descend
from common.objectives.settings import SgdSettings


class Sgd(Objective):
    """f_i(theta): mean cross-entropy of the mini-batch."""

    def __init__(self, settings: SgdSettings) -> None:
        self._settings = settings

    def __repr__(self) -> str:
        return "Sgd()"

    def run(self, task: LocalTask) -> Trained:
        return descend(task, task.start, task.cross_entropy)
