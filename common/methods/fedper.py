"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, 'Federated Learning with Personalization Layers', arXiv 1912.00818, 2019."""

from __future__ import annotations

from attune.common.methods.method import Method

FEDPER = Method(name="fedper", citation="Arivazhagan et al., 2019", parts=(("@head", "private"), ("*", "shared")))
