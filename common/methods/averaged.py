"""Methods in which one model is averaged for all devices, and training alone."""

from __future__ import annotations

from attune.common.methods.method import Method

# No paper: nothing leaves the device. Every table of results needs this row (errata E6).
LOCAL = Method(
    name="local",
    citation="no paper: training alone",
    parts=(("*", "private"),),
    defaults={"round": {"analytic": "off"}},  # its blend is the device's alone, too
)

# McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
# AISTATS 2017 (Algorithm 1).
FEDAVG = Method(name="fedavg", citation="McMahan et al., AISTATS 2017", parts=(("*", "shared"),))

# FedAvg, and before predicting one local epoch from the common model. No paper of its own: beside Local, the row that every
# table of personalized methods needs (errata E6).
FEDAVG_FT = Method(
    name="fedavg+ft",
    citation="McMahan et al., AISTATS 2017, with local fine-tuning",
    parts=(("*", "shared"),),
    predictor="fine-tune",
)

# Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
FEDPROX = Method(
    name="fedprox",
    citation="Li et al., MLSys 2020",
    parts=(("*", "shared"),),
    objective="proximal",
    defaults={"method": {"mu": 0.01}},
)

# Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
# Approach", NeurIPS 2020 (the first-order variant). The average is a start from which one local step leads to a good model;
# a device predicts after that step.
PER_FEDAVG = Method(
    name="per-fedavg",
    citation="Fallah et al., NeurIPS 2020",
    parts=(("*", "shared"),),
    objective="maml",
    predictor="fine-tune",
    defaults={"method": {"tune_steps": 1}},
)
