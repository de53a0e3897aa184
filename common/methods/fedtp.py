"""FedTP: Li, Cai, Wang, Tang, Ding, Lin, Shi, 'FedTP: Federated Learning by Transformer Personalization', IEEE TNNLS 2023.

The q,k,v projections of every block are generated per client by a hypernetwork; the rest is averaged. Rows that vary it:
other layers generated (the paper's table V), and other layers than the generated ones personalized as well.
"""

from __future__ import annotations

from attune.common.methods.method import Method

_CITATION = "Li et al., IEEE TNNLS 2023"

FEDTP = Method(name="fedtp", citation=_CITATION, parts=(("@qkv", "generated"), ("*", "shared")))

FEDTP_MLP = Method(name="fedtp-mlp", citation=f"{_CITATION}, table V", parts=(("@mlp", "generated"), ("*", "shared")))

FEDTP_NORM = Method(name="fedtp-norm", citation=f"{_CITATION}, table V", parts=(("@norm", "generated"), ("*", "shared")))

FEDTP_ENCODER = Method(
    name="fedtp-encoder", citation=f"{_CITATION}, table V", parts=(("@encoder", "generated"), ("*", "shared"))
)

FEDTP_FEDPER = Method(
    name="fedtp+fedper",
    citation=f"{_CITATION} (extensions); Arivazhagan et al., 2019",
    parts=(("@qkv", "generated"), ("@head", "private"), ("*", "shared")),
)

FEDTP_KNN = Method(
    name="fedtp+knn",
    citation=f"{_CITATION} (extensions); Marfoq et al., ICML 2022",
    parts=(("@qkv", "generated"), ("*", "shared")),
    predictor="knn",
)

FEDTP_MCSA = Method(
    name="fedtp+mcsa",
    citation=f"ours, of {_CITATION} and Guo et al., Neurocomputing 2023",
    parts=(("@qkv", "generated"), ("*", "attended")),
    defaults={"method": {"sigma": 50.0}},
)
