"""Methods in which each device keeps a whole model of its own beside the one that it exchanges."""

from __future__ import annotations

from attune.common.methods.method import Method
from attune.common.methods.mixed import WITH_MLR, published

# Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021 (Algorithm 1).
DITTO = Method(
    name="ditto",
    citation="Li et al., ICML 2021",
    parts=(("*", "shared"),),
    objective="own-model",
    predictor="own-model",
    evaluate="trained",
)

# Liu, Hu, Wu, Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022 (MR-MTL).
MR_MTL = Method(
    name="mr-mtl",
    citation="Liu et al., NeurIPS 2022",
    parts=(("*", "shared"),),
    objective="mean-regularised",
    predictor="own-model",
    evaluate="trained",
)

# Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020 (Algorithm 1).
APFL = Method(
    name="apfl",
    citation="Deng et al., 2020",
    parts=(("*", "shared"),),
    objective="mixture",
    predictor="own-model",
    evaluate="trained",
    defaults={"train": {"momentum": 0.0, "clip_norm": 0.0}},
)

# Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023.
FEDALA = Method(
    name="fedala",
    citation="Zhang et al., AAAI 2023",
    parts=(("*", "shared"),),
    objective="local-aggregation",
    predictor="own-model",
    evaluate="trained",
)

# Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in Representation Space",
# NeurIPS 2023.
FEDDBE = Method(
    name="feddbe",
    citation="Zhang et al., NeurIPS 2023",
    parts=(("*", "shared"),),
    objective="domain-bias",
    predictor="domain-bias",
    defaults={"train": {"momentum": 0.0, "clip_norm": 0.0}},
)

# Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020. The personal model theta never
# leaves the device; w, which follows it, is exchanged.
PFEDME = Method(
    name="pfedme",
    citation="Dinh et al., NeurIPS 2020",
    parts=(("*", "shared"),),
    objective="moreau",
    predictor="own-model",
    evaluate="trained",
    defaults={"train": {"momentum": 0.0, "clip_norm": 0.0}},
)

# pFedMe with FedMCSA's attention in place of the mean, under the settings of FedMCSA's table 2.
PFEDME_MCSA = Method(
    name="pfedme+mcsa",
    citation="Dinh et al., NeurIPS 2020; Guo et al., Neurocomputing 2023, table 2",
    parts=(("*", "attended"),),
    objective="moreau",
    predictor="own-model",
    evaluate="trained",
    defaults={"method": {"sigma": 50.0}},
    published=published(sigma=50.0),
    published_with=WITH_MLR,
)

# He, Tong, Fang, Sun, Zeng, Li, Chen, Zhuang, "AFL: A Single-Round Analytic Approach for Federated Learning with Pre-trained
# Models", CVPR 2025; a device's own weights as in arXiv 2508.10732. The first round brings the sums, and the second the fleet's
# choice of a strength.
ANALYTIC = Method(
    name="analytic",
    citation="He et al., CVPR 2025",
    parts=(("strength", "attended"), ("*", "attended")),
    objective="sums",
    predictor="closed-form",
    aggregators={"attended": "closed-form"},
    defaults={"model": {"name": "closed-form"}, "round": {"rounds": 2}, "train": {"validation": 0.0}},
)
