"""Vanilla Personalized-T: the baseline of FedTP's paper in which each device keeps its own q,k,v projections."""

from __future__ import annotations

from attune.common.methods.method import Method

VANILLA_PERSONALIZED = Method(
    name="vanilla-personalized",
    citation="Li et al., IEEE TNNLS 2023",
    parts=(("@qkv", "private"), ("*", "shared")),
)
