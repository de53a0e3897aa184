"""pFedGP: Achituve, Shamsian, Navon, Chechik, Fetaya, 'Personalized Federated Learning with Gaussian Processes', NeurIPS 2021.

The network before the head is the kernel, and is averaged; the Gaussian processes on it are the device's own.
"""

from __future__ import annotations

from attune.common.methods.method import Method

PFEDGP = Method(
    name="pfedgp",
    citation="Achituve et al., NeurIPS 2021",
    parts=(("@head", "private"), ("*", "shared")),
    objective="gp",
    predictor="gp",
)
