"""FedAMP and HeurFedAMP: Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, 'Personalized Cross-Silo Federated Learning on Non-IID
Data', AAAI 2021.

Whole models are mixed by how alike they are, and local steps are pulled towards what was served. Local training is
FedMCSA's, so that its table compares like with like.
"""

from __future__ import annotations

from typing import Any

from attune.common.methods.fedmcsa import MU, WITH_MLR, published
from attune.common.methods.method import Method

_CITATION = "Huang et al., AAAI 2021"


def _row(name: str, aggregator: str, method: dict[str, Any]) -> Method:
    return Method(
        name=name,
        citation=_CITATION,
        parts=(("*", "attended"),),
        objective="proximal",
        aggregators={"attended": aggregator},
        evaluate="trained",
        defaults={"method": {**method, "mu": MU}},
        published=published(**method, mu=5.0),
        published_with=WITH_MLR,
    )


FEDAMP = _row("fedamp", "amp", {})
HEURFEDAMP = _row("heurfedamp", "heur-amp", {"self_weight": 0.25})
