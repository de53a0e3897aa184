"""Methods in which a hypernetwork on the server generates layers of each device's model.

FedTP: Li, Cai, Wang, Tang, Ding, Lin, Shi, "FedTP: Federated Learning by Transformer Personalization", IEEE TNNLS 2023. The
q,k,v projections of every block are generated for each client; the rest is averaged. Other rows generate other layers (the
paper's table V), or personalize further layers as well (its extensions).
"""

from __future__ import annotations

from typing import Any

from attune.common.methods.method import Method

_FEDTP = "Li et al., IEEE TNNLS 2023"


# Settings of the published scripts, for hundreds of rounds; the same for every method of the paper's tables.
_PUBLISHED: dict[str, Any] = {
    "published": {
        "method": {"embedding_dim": 128, "server_optimiser": "sgd", "initialisation": "torch"},
        "train": {
            "lr": 0.01,
            "momentum": 0.9,
            "batch_size": 64,
            "local_epochs": 5,
            "weight_decay": 1e-5,
            "clip_norm": 0.0,
        },
    },
    "published_with": {"vit": {"model": {"preset": "paper"}}},
}


def _of_table_5(name: str, selector: str) -> Method:
    """Return a row that generates other tensors than FedTP does."""
    return Method(name=name, citation=f"{_FEDTP}, table V", parts=((selector, "generated"), ("*", "shared")), **_PUBLISHED)


FEDTP = Method(name="fedtp", citation=_FEDTP, parts=(("@qkv", "generated"), ("*", "shared")), **_PUBLISHED)

FEDTP_MLP = _of_table_5("fedtp-mlp", "@mlp")

FEDTP_NORM = _of_table_5("fedtp-norm", "@norm")

FEDTP_ENCODER = _of_table_5("fedtp-encoder", "@encoder")

# Both factors of each LoRA adapter, wherever the adapters are. The heads' biases are the first factors, so B starts at 0.
FEDTP_LORA = Method(name="fedtp-lora", citation=f"ours, after {_FEDTP}", parts=(("*lora_*", "generated"), ("*", "shared")))

FEDTP_FEDPER = Method(
    **_PUBLISHED,
    name="fedtp+fedper",
    citation=f"{_FEDTP} (extensions); Arivazhagan et al., 2019",
    parts=(("@qkv", "generated"), ("@head", "private"), ("*", "shared")),
)

FEDTP_FEDROD = Method(
    **_PUBLISHED,
    name="fedtp+fedrod",
    citation=f"{_FEDTP} (extensions); Chen and Chao, ICLR 2022",
    parts=(("@qkv", "generated"), ("@head", "shared"), ("*", "shared")),
    objective="two-heads",
    predictor="two-heads",
)

# With Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", ICML 2022.
FEDTP_KNN = Method(
    **_PUBLISHED,
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
