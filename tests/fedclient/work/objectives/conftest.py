"""Tasks on small models, with full control over data, seeds and settings."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from attune.common.config import TrainSettings
from attune.common.seeds import derive
from attune.fedclient.work.objectives.base import LocalTask, Network

MakeTask = Callable[..., LocalTask]


@pytest.fixture
def make_task() -> MakeTask:
    def make(
        model: nn.Module,
        x: torch.Tensor,
        y: torch.Tensor,
        start: Mapping[str, torch.Tensor],
        received: Mapping[str, torch.Tensor] | None = None,
        kinds: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> LocalTask:
        usual: dict[str, Any] = {"lr": 0.5, "momentum": 0.0, "batch_size": 100, "local_epochs": 1, "clip_norm": 0.0}
        return LocalTask(
            network=Network(model),
            start=dict(start),
            received=dict(received if received is not None else start),
            x=x,
            y=y,
            settings=TrainSettings(**(usual | settings)),
            seeds=lambda purpose: derive(7, purpose),
            device=torch.device("cpu"),
            kinds=kinds or {},
        )

    return make
