"""The plain loss: cross-entropy."""

from __future__ import annotations

from attune.common.methods.settings.objectives import SgdSettings
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import LocalTask, Objective, Trained
from attune.fedclient.work.objectives.descent import Descent


class Sgd(Objective[SgdSettings]):
    """f_i(theta): mean cross-entropy of the mini-batch."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        trained: Trained = yield Descent(task, task.settings, task.start, task.plain)
        return trained
