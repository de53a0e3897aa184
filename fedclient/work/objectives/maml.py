"""Objective of first-order MAML.

Fallah, Mokhtari, Ozdaglar, 'Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach', NeurIPS 2020 (Per-FedAvg, the variant FO).
"""

from __future__ import annotations

import msgspec

from attune.common.methods.settings.objectives import MamlSettings
from attune.fedclient.work.job import Jobs
from attune.fedclient.work.objectives.base import LocalTask, Objective, Trained
from attune.fedclient.work.objectives.descent import Ahead, Descent


class Maml(Objective[MamlSettings]):
    """theta <- theta - beta * grad f(theta - alpha * grad f(theta; one batch); another batch)."""

    def work(self, task: LocalTask) -> Jobs[Trained]:
        """Train with as many pairs of batches as SGD would take batches. The reported loss is that after the inner step."""
        alpha, beta = (rate or task.settings.lr for rate in (self._settings.alpha, self._settings.beta))
        outer = msgspec.structs.replace(task.settings, lr=beta)
        trained: Trained = yield Descent(task, outer, task.start, task.plain, ahead=Ahead(alpha, "inner"))
        return trained
