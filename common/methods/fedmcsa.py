"""FedMCSA: Guo, Qi, Qi, Wu, Li, 'FedMCSA: Personalized federated learning via model components self-attention',
Neurocomputing 2023.

Every tensor is attended, component by component, and local steps are pulled towards what was served. The two rows without
one of the two ideas are the ablations of its table 2, under the same settings.
"""

from __future__ import annotations

from typing import Any

from attune.common.methods.method import Method

_CITATION = "Guo et al., Neurocomputing 2023"
TRAIN: dict[str, Any] = {"lr": 0.02, "momentum": 0.0, "batch_size": 20, "local_steps": 20, "clip_norm": 0.0}

FEDMCSA = Method(
    name="fedmcsa",
    citation=_CITATION,
    parts=(("*", "attended"),),
    objective="proximal",
    evaluate="trained",
    defaults={"method": {"sigma": 50.0, "mu": 5.0}, "train": TRAIN},
)

FEDMCSA_WITHOUT_MCSA = Method(
    name="fedmcsa-mcsa",
    citation=f"{_CITATION}, table 2",
    parts=(("*", "shared"),),
    objective="proximal",
    evaluate="trained",
    defaults={"method": {"uniform": True, "mu": 5.0}, "train": TRAIN},
)

FEDAVG_MCSA = Method(
    name="fedavg+mcsa",
    citation=f"{_CITATION}, table 2",
    parts=(("*", "attended"),),
    evaluate="trained",
    defaults={"method": {"sigma": 50.0}, "train": TRAIN},
)
