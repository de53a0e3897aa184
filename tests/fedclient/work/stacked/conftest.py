"""Devices with different numbers of samples, and their local training, stacked and one by one."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attune.common.config import TrainSettings
from attune.common.methods.settings.objectives import ModelSettings
from attune.common.seeds import derive
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.objectives.base import Objective, Tensors, Trained
from attune.fedclient.work.predictors.base import PlainPredictor, Predictor
from attune.fedclient.work.private.noisy_steps import OrderNoise
from attune.fedclient.work.trainer import Trainer

CPU = torch.device("cpu")
SIZES = (7, 20, 33, 12, 20)  # training samples: batches of 8 are 7; 8, 8, 4; four of 8 and one of 1; 8, 4; 8, 8, 4


class Small(nn.Module):
    """Model of two layers, and one unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.body, self.head = nn.Linear(2, 2), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@dataclass
class Device:
    """One device with weights and samples of its own."""

    number: int
    trainer: Trainer
    start: Tensors
    received: Tensors
    x: Tensor
    y: Tensor
    cancelled: Callable[[], bool] = lambda: False
    noise: Callable[[int], OrderNoise | None] = lambda number: None

    def seeds(self, purpose: str) -> int:
        return derive(self.number, purpose)

    def training(self, trains: tuple[str, ...] = ()) -> Jobs[Trained]:
        return self.trainer.training(
            self.start,
            self.received,
            self.x,
            self.y,
            self.seeds,
            cancelled=lambda: self.cancelled(),
            trains=trains,
            noise=self.noise(self.number),
        )


Make = Callable[..., list[Device]]


@pytest.fixture
def make() -> Make:
    def devices(
        objective: Objective,
        model: Callable[[], nn.Module] = Small,
        predictor: Predictor | None = None,
        dtype: torch.dtype = torch.float32,
        shape: tuple[int, ...] = (4,),
        sizes: tuple[int, ...] = SIZES,
        **settings: Any,
    ) -> list[Device]:
        usual: dict[str, Any] = {"lr": 0.2, "momentum": 0.0, "batch_size": 8, "local_epochs": 2, "clip_norm": 0.0}
        made = []
        for number, size in enumerate(sizes):
            torch.manual_seed(0)
            network = model().to(dtype)
            kinds = {name: "private" if name.startswith("head") else "shared" for name in network.state_dict()}
            trainer = Trainer(
                network,
                objective,
                predictor or PlainPredictor(ModelSettings()),
                TrainSettings(**usual | settings),
                CPU,
                kinds,
                "these",
            )
            torch.manual_seed(number)
            start = {
                name: tensor + 0.1 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor.clone()
                for name, tensor in network.state_dict().items()
            }
            received = {name: tensor + 0.1 if tensor.is_floating_point() else tensor for name, tensor in start.items()}
            start |= trainer.extras({name: tensor * 0.9 for name, tensor in start.items()})
            x = torch.randn(size, *shape, dtype=dtype)
            made.append(Device(number, trainer, start, received, x, torch.randint(0, 3, (size,))))
        return made

    return devices


def dropping(share: float) -> Callable[[], nn.Module]:
    """Return a model with dropout."""
    return lambda: nn.Sequential(OrderedDict(body=nn.Linear(4, 6), drop=nn.Dropout(share), head=nn.Linear(6, 3)))
