"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar, 'Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach', NeurIPS 2020 (the first-order variant).

What is averaged is a start from which one local step leads to a good model; a device predicts after that step.
"""

from __future__ import annotations

from attune.common.methods.method import Method

PER_FEDAVG = Method(
    name="per-fedavg",
    citation="Fallah et al., NeurIPS 2020",
    parts=(("*", "shared"),),
    objective="maml",
    predictor="fine-tune",
    defaults={"method": {"tune_steps": 1}},
)
