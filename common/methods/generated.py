"""Methods in which a hypernetwork on the server generates layers of each device's model.

FedTP: Li, Cai, Wang, Tang, Ding, Lin, Shi, "FedTP: Federated Learning by Transformer Personalization", IEEE TNNLS 2023. The
q,k,v projections of every block are generated for each client; the rest is averaged. Other rows generate other layers (the
paper's table V), or personalize further layers as well (its extensions).
"""

from __future__ import annotations

from attune.common.methods.method import Method

_FEDTP = "Li et al., IEEE TNNLS 2023"

FEDTP = Method(name="fedtp", citation=_FEDTP, parts=(("@qkv", "generated"), ("*", "shared")))

FEDTP_MLP = Method(name="fedtp-mlp", citation=f"{_FEDTP}, table V", parts=(("@mlp", "generated"), ("*", "shared")))

FEDTP_NORM = Method(name="fedtp-norm", citation=f"{_FEDTP}, table V", parts=(("@norm", "generated"), ("*", "shared")))

FEDTP_ENCODER = Method(name="fedtp-encoder", citation=f"{_FEDTP}, table V", parts=(("@encoder", "generated"), ("*", "shared")))

FEDTP_FEDPER = Method(
    name="fedtp+fedper",
    citation=f"{_FEDTP} (extensions); Arivazhagan et al., 2019",
    parts=(("@qkv", "generated"), ("@head", "private"), ("*", "shared")),
)

FEDTP_FEDROD = Method(
    name="fedtp+fedrod",
    citation=f"{_FEDTP} (extensions); Chen and Chao, ICLR 2022",
    parts=(("@qkv", "generated"), ("@head", "shared"), ("*", "shared")),
    objective="two-heads",
    predictor="two-heads",
)

# With Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", ICML 2022.
FEDTP_KNN = Method(
    name="fedtp+knn",
    citation=f"{_FEDTP} (extensions); Marfoq et al., ICML 2022",
    parts=(("@qkv", "generated"), ("*", "shared")),
    predictor="knn",
)

FEDTP_MCSA = Method(
    name="fedtp+mcsa",
    citation=f"ours, of {_FEDTP} and Guo et al., Neurocomputing 2023",
    parts=(("@qkv", "generated"), ("*", "attended")),
    defaults={"method": {"sigma": 50.0}},
)

# Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021.
PFEDHN = Method(
    name="pfedhn",
    citation="Shamsian et al., ICML 2021",
    parts=(("*", "generated"),),
    defaults={"method": {"hidden": 100}},
)
