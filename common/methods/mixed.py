"""Methods in which the server mixes the models of clients that are alike.

FedMCSA: Guo, Qi, Qi, Wu, Li, "FedMCSA: Personalized federated learning via model components self-attention", Neurocomputing
2023. Every tensor is mixed, component by component, and local steps are pulled towards what was served. The rows without one
of the two ideas are the ablations of its table 2, under the same settings. The published settings are for hundreds of rounds
and hardly train in tens; the everyday ones were chosen on validation data (docs/methods/fedmcsa.md).
"""

from __future__ import annotations

from typing import Any

from attune.common.methods.method import Method

_FEDMCSA = "Guo et al., Neurocomputing 2023"
_MU = 0.0  # of everyday use; also the form of the published code, in which the pull has no effect (erratum E4)
_TRAIN: dict[str, Any] = {"lr": 0.02, "momentum": 0.0, "batch_size": 20, "local_steps": 20, "clip_norm": 0.0}
WITH_MLR: dict[str, dict[str, Any]] = {"mlr": {"train": {"weight_decay": 1e-3}}}  # the paper's l2 of its logistic regression


def published(**method: Any) -> dict[str, Any]:
    """Return the settings under which FedMCSA's table 2 compares all methods: everyone trains in every round."""
    return {"method": method, "train": _TRAIN, "round": {"train": "all"}}


FEDMCSA = Method(
    name="fedmcsa",
    citation=_FEDMCSA,
    parts=(("*", "attended"),),
    objective="proximal",
    evaluate="trained",
    defaults={"method": {"sigma": 50.0, "mu": _MU}},
    published=published(sigma=50.0, mu=5.0),
    published_with=WITH_MLR,
)

FEDMCSA_WITHOUT_MCSA = Method(
    name="fedmcsa-mcsa",
    citation=f"{_FEDMCSA}, table 2",
    parts=(("*", "shared"),),
    objective="proximal",
    evaluate="trained",
    defaults={"method": {"uniform": True, "mu": _MU}},
    published=published(uniform=True, mu=5.0),
    published_with=WITH_MLR,
)

FEDAVG_MCSA = Method(
    name="fedavg+mcsa",
    citation=f"{_FEDMCSA}, table 2",
    parts=(("*", "attended"),),
    evaluate="trained",
    defaults={"method": {"sigma": 50.0}},
    published=published(sigma=50.0),
    published_with=WITH_MLR,
)


def _message_passing(name: str, aggregator: str, method: dict[str, Any]) -> Method:
    """Return a row of FedAMP's family.

    Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021. Whole
    models are mixed. Local training is FedMCSA's, so that its table compares like with like.
    """
    return Method(
        name=name,
        citation="Huang et al., AAAI 2021",
        parts=(("*", "attended"),),
        objective="proximal",
        aggregators={"attended": aggregator},
        evaluate="trained",
        defaults={"method": {**method, "mu": _MU}},
        published=published(**method, mu=5.0),
        published_with=WITH_MLR,
    )


FEDAMP = _message_passing("fedamp", "amp", {})
HEURFEDAMP = _message_passing("heurfedamp", "heur-amp", {"self_weight": 0.25})
