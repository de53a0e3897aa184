"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, 'Federated Optimization in Heterogeneous Networks', MLSys 2020."""

from __future__ import annotations

from attune.common.methods.method import Method

FEDPROX = Method(
    name="fedprox",
    citation="Li et al., MLSys 2020",
    parts=(("*", "shared"),),
    objective="proximal",
    defaults={"method": {"mu": 0.01}},
)
