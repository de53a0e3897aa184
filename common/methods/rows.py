"""Rows of the built-in methods.

Methods that average one model, or share some layers, or keep a whole model on each device, cite their papers above their rows.

FedMCSA: Guo, Qi, Qi, Wu, Li, "FedMCSA: Personalized federated learning via model components self-attention", Neurocomputing
2023. The server mixes the models of clients that are alike. Every tensor is mixed, component by component, and local steps are
pulled towards what was served. The rows without one of the two ideas are the ablations of its table 2, under the same settings.
The published settings are for hundreds of rounds and hardly train in tens; the everyday ones were chosen on validation data
(docs/methods/fedmcsa.md).

FedTP: Li, Cai, Wang, Tang, Ding, Lin, Shi, "FedTP: Federated Learning by Transformer Personalization", IEEE TNNLS 2023. A
hypernetwork on the server generates the q,k,v projections of every block for each client; the rest is averaged. Other rows
generate other layers (the paper's table V), or personalize further layers as well (its extensions).
"""

from __future__ import annotations

from typing import Any

from attune.common.methods.method import Method

_FEDMCSA, _FEDTP = "Guo et al., Neurocomputing 2023", "Li et al., IEEE TNNLS 2023"
_MU = 0.0  # of everyday use; also the form of the published code, in which the pull has no effect (erratum E4)
_TRAIN: dict[str, Any] = {"lr": 0.02, "momentum": 0.0, "batch_size": 20, "local_steps": 20, "clip_norm": 0.0}
_WITH_MLR: dict[str, dict[str, Any]] = {"mlr": {"train": {"weight_decay": 1e-3}}}  # the paper's l2 of its logistic regression


def _published(**method: Any) -> dict[str, Any]:
    """Return the settings under which FedMCSA's table 2 compares all methods: everyone trains in every round."""
    return {"method": method, "train": _TRAIN, "round": {"train": "all"}}


def _message_passing(name: str, aggregator: str, method: dict[str, Any]) -> Method:
    """Return a row of FedAMP's family.

    Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021. Whole
    models are mixed. Local training is FedMCSA's, so that its table compares like with like.
    """
    return Method(
        name=name,
        citation="Huang et al., AAAI 2021",
        parts=(("*", "attended"),),
        objective="proximal",
        aggregators={"attended": aggregator},
        evaluate="trained",
        defaults={"method": {**method, "mu": _MU}},
        published=_published(**method, mu=5.0),
        published_with=_WITH_MLR,
    )


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


ROWS = (
    # No paper: nothing leaves the device. Every table of results needs this row (errata E6).
    Method(
        name="local",
        citation="no paper: training alone",
        parts=(("*", "private"),),
        defaults={"round": {"analytic": "off"}},  # its blend is the device's alone, too
    ),
    # McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
    # Data", AISTATS 2017 (Algorithm 1).
    Method(name="fedavg", citation="McMahan et al., AISTATS 2017", parts=(("*", "shared"),)),
    # FedAvg, and before predicting one local epoch from the common model. No paper of its own: beside Local, the row that every
    # table of personalized methods needs (errata E6).
    Method(
        name="fedavg+ft",
        citation="McMahan et al., AISTATS 2017, with local fine-tuning",
        parts=(("*", "shared"),),
        predictor="fine-tune",
    ),
    # Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
    Method(
        name="fedprox",
        citation="Li et al., MLSys 2020",
        parts=(("*", "shared"),),
        objective="proximal",
        defaults={"method": {"mu": 0.01}},
    ),
    # Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
    # Approach", NeurIPS 2020 (the first-order variant). The average is a start from which one local step leads to a good model;
    # a device predicts after that step.
    Method(
        name="per-fedavg",
        citation="Fallah et al., NeurIPS 2020",
        parts=(("*", "shared"),),
        objective="maml",
        predictor="fine-tune",
        defaults={"method": {"tune_steps": 1}},
    ),
    # Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818, 2019.
    Method(name="fedper", citation="Arivazhagan et al., 2019", parts=(("@head", "private"), ("*", "shared"))),
    # Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
    # 2021.
    Method(
        name="fedrep",
        citation="Collins et al., ICML 2021",
        parts=(("@head", "private"), ("*", "shared")),
        objective="alternating",
    ),
    # Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
    Method(
        name="fedbabu",
        citation="Oh et al., ICLR 2022",
        parts=(("@head", "private"), ("*", "shared")),
        objective="frozen-private",
        predictor="fine-tune",
        defaults={"method": {"tune_epochs": 5}},
    ),
    # Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
    # Normalisation layers of any kind stay private, with their running statistics.
    Method(name="fedbn", citation="Li et al., ICLR 2021", parts=(("@norm", "private"), ("*", "shared"))),
    # Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.
    Method(
        name="fedrod",
        citation="Chen and Chao, ICLR 2022",
        parts=(("@head", "shared"), ("*", "shared")),
        objective="two-heads",
        predictor="two-heads",
    ),
    # Guo, Zeng, Wang, Fan, Wang, Qu, "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025: the
    # first factors of LoRA adapters are averaged, the second ones stay on the device. A model names them as peft does.
    Method(name="fedsa-lora", citation="Guo et al., ICLR 2025", parts=(("*lora_A*", "shared"), ("*", "private"))),
    # Vanilla Personalized-T: the baseline of FedTP's paper (Li et al., IEEE TNNLS 2023) in which each device keeps its own
    # q,k,v projections.
    Method(
        name="vanilla-personalized",
        citation="Li et al., IEEE TNNLS 2023",
        parts=(("@qkv", "private"), ("*", "shared")),
    ),
    Method(
        name="fedmcsa",
        citation=_FEDMCSA,
        parts=(("*", "attended"),),
        objective="proximal",
        evaluate="trained",
        defaults={"method": {"sigma": 50.0, "mu": _MU}},
        published=_published(sigma=50.0, mu=5.0),
        published_with=_WITH_MLR,
    ),
    Method(
        name="fedmcsa-mcsa",
        citation=f"{_FEDMCSA}, table 2",
        parts=(("*", "shared"),),
        objective="proximal",
        evaluate="trained",
        defaults={"method": {"uniform": True, "mu": _MU}},
        published=_published(uniform=True, mu=5.0),
        published_with=_WITH_MLR,
    ),
    Method(
        name="fedavg+mcsa",
        citation=f"{_FEDMCSA}, table 2",
        parts=(("*", "attended"),),
        evaluate="trained",
        defaults={"method": {"sigma": 50.0}},
        published=_published(sigma=50.0),
        published_with=_WITH_MLR,
    ),
    _message_passing("fedamp", "amp", {}),
    _message_passing("heurfedamp", "heur-amp", {"self_weight": 0.25}),
    # Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021 (Algorithm 1).
    Method(
        name="ditto",
        citation="Li et al., ICML 2021",
        parts=(("*", "shared"),),
        objective="own-model",
        predictor="own-model",
        evaluate="trained",
    ),
    # Liu, Hu, Wu, Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022 (MR-MTL).
    Method(
        name="mr-mtl",
        citation="Liu et al., NeurIPS 2022",
        parts=(("*", "shared"),),
        objective="mean-regularised",
        predictor="own-model",
        evaluate="trained",
    ),
    # Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020 (Algorithm 1).
    Method(
        name="apfl",
        citation="Deng et al., 2020",
        parts=(("*", "shared"),),
        objective="mixture",
        predictor="own-model",
        evaluate="trained",
        defaults={"train": {"momentum": 0.0, "clip_norm": 0.0}},
    ),
    # Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
    # 2023.
    Method(
        name="fedala",
        citation="Zhang et al., AAAI 2023",
        parts=(("*", "shared"),),
        objective="local-aggregation",
        predictor="own-model",
        evaluate="trained",
    ),
    # Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in Representation Space",
    # NeurIPS 2023.
    Method(
        name="feddbe",
        citation="Zhang et al., NeurIPS 2023",
        parts=(("*", "shared"),),
        objective="domain-bias",
        predictor="domain-bias",
        defaults={"train": {"momentum": 0.0, "clip_norm": 0.0}},
    ),
    # Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020. The personal model theta never
    # leaves the device; w, which follows it, is exchanged.
    Method(
        name="pfedme",
        citation="Dinh et al., NeurIPS 2020",
        parts=(("*", "shared"),),
        objective="moreau",
        predictor="own-model",
        evaluate="trained",
        defaults={"train": {"momentum": 0.0, "clip_norm": 0.0}},
    ),
    # pFedMe with FedMCSA's attention in place of the mean, under the settings of FedMCSA's table 2.
    Method(
        name="pfedme+mcsa",
        citation="Dinh et al., NeurIPS 2020; Guo et al., Neurocomputing 2023, table 2",
        parts=(("*", "attended"),),
        objective="moreau",
        predictor="own-model",
        evaluate="trained",
        defaults={"method": {"sigma": 50.0}},
        published=_published(sigma=50.0),
        published_with=_WITH_MLR,
    ),
    # He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang, "AFL: A Single-Round Analytic Approach for Federated Learning with
    # Pre-trained Models", CVPR 2025; a device's own weights as in arXiv 2508.10732. The first round brings the sums, and the
    # second the fleet's choice of a strength.
    Method(
        name="analytic",
        citation="He et al., CVPR 2025",
        parts=(("strength", "attended"), ("*", "attended")),
        objective="sums",
        predictor="closed-form",
        aggregators={"attended": "closed-form"},
        defaults={"model": {"name": "closed-form"}, "round": {"rounds": 2}, "train": {"validation": 0.0}},
    ),
    Method(name="fedtp", citation=_FEDTP, parts=(("@qkv", "generated"), ("*", "shared")), **_PUBLISHED),
    _of_table_5("fedtp-mlp", "@mlp"),
    _of_table_5("fedtp-norm", "@norm"),
    _of_table_5("fedtp-encoder", "@encoder"),
    # Both factors of each LoRA adapter, wherever the adapters are. The heads' biases are the first factors, so B starts at 0.
    Method(name="fedtp-lora", citation=f"ours, after {_FEDTP}", parts=(("*lora_*", "generated"), ("*", "shared"))),
    Method(
        **_PUBLISHED,
        name="fedtp+fedper",
        citation=f"{_FEDTP} (extensions); Arivazhagan et al., 2019",
        parts=(("@qkv", "generated"), ("@head", "private"), ("*", "shared")),
    ),
    Method(
        **_PUBLISHED,
        name="fedtp+fedrod",
        citation=f"{_FEDTP} (extensions); Chen and Chao, ICLR 2022",
        parts=(("@qkv", "generated"), ("@head", "shared"), ("*", "shared")),
        objective="two-heads",
        predictor="two-heads",
    ),
    # With Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", ICML 2022.
    Method(
        **_PUBLISHED,
        name="fedtp+knn",
        citation=f"{_FEDTP} (extensions); Marfoq et al., ICML 2022",
        parts=(("@qkv", "generated"), ("*", "shared")),
        predictor="knn",
    ),
    Method(
        name="fedtp+mcsa",
        citation=f"ours, of {_FEDTP} and Guo et al., Neurocomputing 2023",
        parts=(("@qkv", "generated"), ("*", "attended")),
        defaults={"method": {"sigma": 50.0}},
    ),
    # Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021.
    Method(
        name="pfedhn",
        citation="Shamsian et al., ICML 2021",
        parts=(("*", "generated"),),
        defaults={"method": {"hidden": 100}},
    ),
)
