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

from attune.common.methods.method import Method, PartKind

RowSettings = dict[str, Any]
_FEDMCSA, _FEDTP = "Guo et al., Neurocomputing 2023", "Li et al., IEEE TNNLS 2023"
_SHARED: tuple[tuple[str, PartKind], ...] = (("*", "shared"),)
_OWN_HEAD: tuple[tuple[str, PartKind], ...] = (("@head", "private"), *_SHARED)
_OWN_MODEL: RowSettings = {"predictor": "own-model", "evaluate": "trained"}
_PLAIN_STEPS: RowSettings = {"defaults": {"train": {"momentum": 0.0, "clip_norm": 0.0}}}
_MU = 0.0  # of everyday use; also the form of the published code, in which the pull has no effect (erratum E4)
_TRAIN: RowSettings = {"lr": 0.02, "momentum": 0.0, "batch_size": 20, "local_steps": 20, "clip_norm": 0.0}


def _of_table_2(name: str, citation: str, kind: PartKind, method: RowSettings, mu: bool = True, **more: Any) -> Method:
    """Return a row under the settings of FedMCSA's table 2, which compares all methods: everyone trains in every round.

    The paper has the l2 of its logistic regression. `mu`: local training has the pull, with the paper's strength as published.
    """
    return Method(
        **{"objective": "proximal" if mu else "sgd", "evaluate": "trained", **more},
        name=name,
        citation=citation,
        parts=(("*", kind),),
        defaults={"method": method | ({"mu": _MU} if mu else {})},
        published={"method": method | ({"mu": 5.0} if mu else {}), "train": _TRAIN, "round": {"train": "all"}},
        published_with={"mlr": {"train": {"weight_decay": 1e-3}}},
    )


def _amp(name: str, aggregator: str, method: RowSettings) -> Method:
    """Return a row of FedAMP's family.

    Huang, Chu, Zhou, Wang, Liu, Pei, Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021. Whole
    models are mixed. Local training is FedMCSA's, so that its table compares like with like.
    """
    return _of_table_2(name, "Huang et al., AAAI 2021", "attended", method, aggregators={"attended": aggregator})


def _fedtp(name: str, citation: str, *personal: tuple[str, PartKind], **more: Any) -> Method:
    """Return a row with the settings of the published scripts, the same for every method of the paper's tables.

    They are for hundreds of rounds.
    """
    train = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "local_epochs": 5, "weight_decay": 1e-5, "clip_norm": 0.0}
    method = {"embedding_dim": 128, "server_optimiser": "sgd", "initialisation": "torch"}
    return Method(
        **more,
        name=name,
        citation=f"{_FEDTP}{citation}",
        parts=(*personal, *_SHARED),
        published={"method": method, "train": train},
        published_with={"vit": {"model": {"preset": "paper"}}},
    )


ROWS = (
    # No paper: nothing leaves the device, its blend included. Every table of results needs this row (errata E6).
    Method("local", "no paper: training alone", (("*", "private"),), defaults={"round": {"analytic": "off"}}),
    # McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
    # Data", AISTATS 2017 (Algorithm 1).
    Method("fedavg", "McMahan et al., AISTATS 2017", _SHARED),
    # FedAvg, and before predicting one local epoch from the common model. No paper of its own: beside Local, the row that every
    # table of personalized methods needs (errata E6).
    Method("fedavg+ft", "McMahan et al., AISTATS 2017, with local fine-tuning", _SHARED, predictor="fine-tune"),
    # Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
    Method("fedprox", "Li et al., MLSys 2020", _SHARED, "proximal", defaults={"method": {"mu": 0.01}}),
    # Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
    # Approach", NeurIPS 2020 (the first-order variant). The average is a start from which one local step leads to a good model;
    # a device predicts after that step.
    Method("per-fedavg", "Fallah et al., NeurIPS 2020", _SHARED, "maml", "fine-tune", defaults={"method": {"tune_steps": 1}}),
    # Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv 1912.00818, 2019.
    Method("fedper", "Arivazhagan et al., 2019", _OWN_HEAD),
    # Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
    # 2021.
    Method("fedrep", "Collins et al., ICML 2021", _OWN_HEAD, "alternating"),
    # Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
    Method(
        "fedbabu", "Oh et al., ICLR 2022", _OWN_HEAD, "frozen-private", "fine-tune", defaults={"method": {"tune_epochs": 5}}
    ),
    # Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
    # Normalisation layers of any kind stay private, with their running statistics.
    Method("fedbn", "Li et al., ICLR 2021", (("@norm", "private"), *_SHARED)),
    # Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.
    Method("fedrod", "Chen and Chao, ICLR 2022", (("@head", "shared"), *_SHARED), "two-heads", "two-heads"),
    # Guo, Zeng, Wang, Fan, Wang, Qu, "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025: the
    # first factors of LoRA adapters are averaged, the second ones stay on the device. A model names them as peft does.
    Method("fedsa-lora", "Guo et al., ICLR 2025", (("*lora_A*", "shared"), ("*", "private"))),
    # Vanilla Personalized-T: the baseline of FedTP's paper (Li et al., IEEE TNNLS 2023) in which each device keeps its own
    # q,k,v projections.
    Method("vanilla-personalized", _FEDTP, (("@qkv", "private"), *_SHARED)),
    _of_table_2("fedmcsa", _FEDMCSA, "attended", {"sigma": 50.0}),
    _of_table_2("fedmcsa-mcsa", f"{_FEDMCSA}, table 2", "shared", {"uniform": True}),
    _of_table_2("fedavg+mcsa", f"{_FEDMCSA}, table 2", "attended", {"sigma": 50.0}, mu=False),
    _amp("fedamp", "amp", {}),
    _amp("heurfedamp", "heur-amp", {"self_weight": 0.25}),
    # Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021 (Algorithm 1).
    Method("ditto", "Li et al., ICML 2021", _SHARED, "own-model", **_OWN_MODEL),
    # Liu, Hu, Wu, Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022 (MR-MTL).
    Method("mr-mtl", "Liu et al., NeurIPS 2022", _SHARED, "mean-regularised", **_OWN_MODEL),
    # Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020 (Algorithm 1).
    Method("apfl", "Deng et al., 2020", _SHARED, "mixture", **_OWN_MODEL, **_PLAIN_STEPS),
    # Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
    # 2023.
    Method("fedala", "Zhang et al., AAAI 2023", _SHARED, "local-aggregation", **_OWN_MODEL),
    # Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in Representation Space",
    # NeurIPS 2023.
    Method("feddbe", "Zhang et al., NeurIPS 2023", _SHARED, "domain-bias", "domain-bias", **_PLAIN_STEPS),
    # Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020. The personal model theta never
    # leaves the device; w, which follows it, is exchanged.
    Method("pfedme", "Dinh et al., NeurIPS 2020", _SHARED, "moreau", **_OWN_MODEL, **_PLAIN_STEPS),
    # pFedMe with FedMCSA's attention in place of the mean, under the settings of FedMCSA's table 2.
    _of_table_2(
        "pfedme+mcsa",
        f"Dinh et al., NeurIPS 2020; {_FEDMCSA}, table 2",
        "attended",
        {"sigma": 50.0},
        mu=False,
        objective="moreau",
        **_OWN_MODEL,
    ),
    # He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang, "AFL: A Single-Round Analytic Approach for Federated Learning with
    # Pre-trained Models", CVPR 2025; a device's own weights as in arXiv 2508.10732. The first round brings the sums, and the
    # second the fleet's choice of a strength.
    Method(
        "analytic",
        "He et al., CVPR 2025",
        (("strength", "attended"), ("*", "attended")),
        "sums",
        "closed-form",
        aggregators={"attended": "closed-form"},
        defaults={"model": {"name": "closed-form"}, "round": {"rounds": 2}, "train": {"validation": 0.0}},
    ),
    _fedtp("fedtp", "", ("@qkv", "generated")),
    _fedtp("fedtp-mlp", ", table V", ("@mlp", "generated")),
    _fedtp("fedtp-norm", ", table V", ("@norm", "generated")),
    _fedtp("fedtp-encoder", ", table V", ("@encoder", "generated")),
    # Both factors of each LoRA adapter, wherever the adapters are. The heads' biases are the first factors, so B starts at 0.
    Method("fedtp-lora", f"ours, after {_FEDTP}", (("*lora_*", "generated"), *_SHARED)),
    _fedtp("fedtp+fedper", " (extensions); Arivazhagan et al., 2019", ("@qkv", "generated"), ("@head", "private")),
    _fedtp(
        "fedtp+fedrod",
        " (extensions); Chen and Chao, ICLR 2022",
        ("@qkv", "generated"),
        ("@head", "shared"),
        objective="two-heads",
        predictor="two-heads",
    ),
    # With Marfoq, Neglia, Kameni, Vidal, "Personalized Federated Learning through Local Memorization", ICML 2022.
    _fedtp("fedtp+knn", " (extensions); Marfoq et al., ICML 2022", ("@qkv", "generated"), predictor="knn"),
    Method(
        "fedtp+mcsa",
        f"ours, of {_FEDTP} and {_FEDMCSA}",
        (("@qkv", "generated"), ("*", "attended")),
        defaults={"method": {"sigma": 50.0}},
    ),
    # Shamsian, Navon, Fetaya, Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021.
    Method("pfedhn", "Shamsian et al., ICML 2021", (("*", "generated"),), defaults={"method": {"hidden": 100}}),
)
