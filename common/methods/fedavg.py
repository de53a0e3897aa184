"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, 'Communication-Efficient Learning of Deep Networks from
Decentralized Data', AISTATS 2017 (Algorithm 1)."""

from __future__ import annotations

from attune.common.methods.method import Method

FEDAVG = Method(name="fedavg", citation="McMahan et al., AISTATS 2017", parts=(("*", "shared"),))
