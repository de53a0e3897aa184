"""Own model and own method on torch Datasets: the body is shared, and the head never leaves a device."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.utils.data import TensorDataset

import attune

METHOD = {"name": "custom", "parts": {"body.*": "shared", "*": "private"}}


def main(rounds: int = 20) -> None:
    """Print a table. All devices have the same inputs, and each has labels of its own."""
    generator = torch.Generator().manual_seed(0)
    data = {}
    for device in range(4):
        x = torch.randn(200, 8, generator=generator)
        data[f"device{device}"] = TensorDataset(x, (x[:, device] > x[:, device + 1]).long())
    model = nn.Sequential(OrderedDict(body=nn.Linear(8, 32), act=nn.Tanh(), head=nn.Linear(32, 2)))
    result = attune.simulate(data, METHOD, model, rounds=rounds, baseline="alone+local")
    print(result.table())
    print(result.model("device0").predict(torch.eye(8).numpy()))


if __name__ == "__main__":
    main()
