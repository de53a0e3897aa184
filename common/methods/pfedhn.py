"""pFedHN: Shamsian, Navon, Fetaya, Chechik, 'Personalized Federated Learning using Hypernetworks', ICML 2021."""

from __future__ import annotations

from attune.common.methods.method import Method

PFEDHN = Method(
    name="pfedhn",
    citation="Shamsian et al., ICML 2021",
    parts=(("*", "generated"),),
    defaults={"method": {"hidden": 100}},
)
