"""pfl-research in one process, as it runs without Horovod (requirements: pfl.txt)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.contenders import task


class Scored(nn.Module):
    """Model of the task with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"accuracy": Weighted(int((self.inner(x).argmax(1) == y).sum()), len(x))}


class Shuffled(PyTorchTensorDataset):
    """Batches of the task, in place of one pass in order."""

    generator = torch.Generator().manual_seed(0)

    def iter(self, batch_size: int | None) -> Iterable[tuple[Tensor, ...]]:
        x, y = self.raw_data
        return ((x[some], y[some]) for some in task.batches(len(x), self.generator))


class Said(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        task.say_round()
        return False, Metrics()


def main() -> None:
    path, rounds = task.given()
    devices = task.tensors(path)
    net = Scored(task.model(devices[0][0].shape[1:]))
    users = [str(number) for number in range(len(devices))]
    data = FederatedDataset(
        lambda user: Shuffled(devices[int(user)][:2], user_id=user), get_user_sampler("minimize_reuse", users)
    )
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=task.RATE, local_batch_size=task.BATCH, local_max_grad_norm=None
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds + 1, train_cohort_size=len(users), val_cohort_size=0
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=training,
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Said()],
    )
    task.say_accuracy(task.accuracy(net.inner.state_dict(), devices))


if __name__ == "__main__":
    main()
