"""Methods in which devices share some layers and keep others, or have two heads."""

from __future__ import annotations

from attune.common.methods.method import Method

# Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818, 2019.
FEDPER = Method(name="fedper", citation="Arivazhagan et al., 2019", parts=(("@head", "private"), ("*", "shared")))

# Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
FEDREP = Method(
    name="fedrep",
    citation="Collins et al., ICML 2021",
    parts=(("@head", "private"), ("*", "shared")),
    objective="alternating",
)

# Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
FEDBABU = Method(
    name="fedbabu",
    citation="Oh et al., ICLR 2022",
    parts=(("@head", "private"), ("*", "shared")),
    objective="frozen-private",
    predictor="fine-tune",
    defaults={"method": {"tune_epochs": 5}},
)

# Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
# Normalisation layers of any kind stay private, with their running statistics.
FEDBN = Method(name="fedbn", citation="Li et al., ICLR 2021", parts=(("@norm", "private"), ("*", "shared")))

# Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.
FEDROD = Method(
    name="fedrod",
    citation="Chen and Chao, ICLR 2022",
    parts=(("@head", "shared"), ("*", "shared")),
    objective="two-heads",
    predictor="two-heads",
)

# Guo, Zeng, Wang, Fan, Wang, Qu, "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025: the first
# factors of LoRA adapters are averaged, the second ones stay on the device. A model names them as peft does.
FEDSA_LORA = Method(name="fedsa-lora", citation="Guo et al., ICLR 2025", parts=(("*lora_A*", "shared"), ("*", "private")))

# Vanilla Personalized-T: the baseline of FedTP's paper (Li et al., IEEE TNNLS 2023) in which each device keeps its own q,k,v
# projections.
VANILLA_PERSONALIZED = Method(
    name="vanilla-personalized",
    citation="Li et al., IEEE TNNLS 2023",
    parts=(("@qkv", "private"), ("*", "shared")),
)
