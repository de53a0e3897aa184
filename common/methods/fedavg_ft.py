"""FedAvg + FT: FedAvg (McMahan et al., AISTATS 2017), and before predicting one local epoch from the common model.

No paper of its own: the row, beside Local, that every table of personalized methods needs (errata E6)."""

from __future__ import annotations

from attune.common.methods.method import Method

FEDAVG_FT = Method(
    name="fedavg+ft",
    citation="McMahan et al., AISTATS 2017, with local fine-tuning",
    parts=(("*", "shared"),),
    predictor="fine-tune",
)
