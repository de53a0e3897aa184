"""Ditto: Li, Hu, Beirami, Smith, 'Ditto: Fair and Robust Federated Learning Through Personalization', ICML
2021 (Algorithm 1)."""

from __future__ import annotations

from attune.common.methods.method import Method

DITTO = Method(
    name="ditto",
    citation="Li et al., ICML 2021",
    parts=(("*", "shared"),),
    objective="own-model",
    predictor="own-model",
    evaluate="trained",
)
