"""FedBN: Li, Jiang, Zhang, Kamp, Dou, 'FedBN: Federated Learning on Non-IID Features via Local Batch Normalization',
ICLR 2021. Normalisation layers of any kind stay private, with their running statistics."""

from __future__ import annotations

from attune.common.methods.method import Method

FEDBN = Method(name="fedbn", citation="Li et al., ICLR 2021", parts=(("@norm", "private"), ("*", "shared")))
