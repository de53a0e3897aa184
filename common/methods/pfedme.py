"""pFedMe: Dinh, Tran, Nguyen, 'Personalized Federated Learning with Moreau Envelopes', NeurIPS 2020; and with FedMCSA's
attention in place of the mean: Guo et al., Neurocomputing 2023, table 2, under the settings of that table.

The personal model theta never leaves the device; w, which follows it, is exchanged.
"""

from __future__ import annotations

from attune.common.methods.fedmcsa import WITH_MLR, published
from attune.common.methods.method import Method

PFEDME = Method(
    name="pfedme",
    citation="Dinh et al., NeurIPS 2020",
    parts=(("*", "shared"),),
    objective="moreau",
    predictor="own-model",
    evaluate="trained",
    defaults={"train": {"momentum": 0.0, "clip_norm": 0.0}},
)

PFEDME_MCSA = Method(
    name="pfedme+mcsa",
    citation="Dinh et al., NeurIPS 2020; Guo et al., Neurocomputing 2023, table 2",
    parts=(("*", "attended"),),
    objective="moreau",
    predictor="own-model",
    evaluate="trained",
    defaults={"method": {"sigma": 50.0}},
    published=published(sigma=50.0),
    published_with=WITH_MLR,
)
