"""FedRoD: Chen, Chao, 'On Bridging Generic and Personalized Federated Learning for Image Classification', ICLR 2022; and with
generated q,k,v: the extension of FedTP's paper (Li et al., IEEE TNNLS 2023)."""

from __future__ import annotations

from attune.common.methods.method import Method

FEDROD = Method(
    name="fedrod",
    citation="Chen and Chao, ICLR 2022",
    parts=(("@head", "shared"), ("*", "shared")),
    objective="two-heads",
    predictor="two-heads",
)

FEDTP_FEDROD = Method(
    name="fedtp+fedrod",
    citation="Li et al., IEEE TNNLS 2023 (extensions); Chen and Chao, ICLR 2022",
    parts=(("@qkv", "generated"), ("@head", "shared"), ("*", "shared")),
    objective="two-heads",
    predictor="two-heads",
)
