"""The rows of the methods. A row needs no torch."""

from __future__ import annotations

from attune.plugin import Method

# Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with Local
# and Global Representations", arXiv 2001.01523, 2020. The head is averaged; the layers before it stay on the device.
LG_FEDAVG = Method(
    name="lg-fedavg",
    citation="Liang et al., 2020",
    parts=(("@head", "shared"), ("*", "private")),
)

# Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", ICLR 2021 (FedAdam).
FEDADAM = Method(
    name="fedadam",
    citation="Reddi et al., ICLR 2021",
    parts=(("*", "shared"),),
    aggregators={"shared": "fedadam"},
)

# The same with an objective and a predictor of this package.
FEDADAM_LA = Method(
    name="fedadam+la",
    citation="Reddi et al., ICLR 2021; Menon et al., ICLR 2021",
    parts=(("*", "shared"),),
    objective="logit-adjusted",
    predictor="logit-adjusted",
    aggregators={"shared": "fedadam"},
)
