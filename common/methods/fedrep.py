"""FedRep: Collins, Hassani, Mokhtari, Shakkottai, 'Exploiting Shared Representations for Personalized Federated Learning',
ICML 2021."""

from __future__ import annotations

from attune.common.methods.method import Method

FEDREP = Method(
    name="fedrep",
    citation="Collins et al., ICML 2021",
    parts=(("@head", "private"), ("*", "shared")),
    objective="alternating",
)
