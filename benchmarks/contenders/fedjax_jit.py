"""FedJAX's federated averaging with its default backend, which compiles a client's step.

Its last version, 0.0.17, needs an older JAX: `pip install torch fedjax jax==0.4.25 jaxlib==0.4.25 'numpy<2' 'scipy<1.13'
'ml_dtypes<0.5' dm-haiku==0.0.12 'optax<0.2.4' 'chex<0.1.87'`.
"""

from __future__ import annotations

import fedjax
import jax
import numpy as np
import torch
from fedjax.algorithms import fed_avg

from benchmarks.contenders import task

BATCHES = fedjax.ShuffleRepeatBatchHParams(batch_size=task.BATCH, num_epochs=None, num_steps=task.STEPS)


def loss(params: fedjax.Params, batch: fedjax.BatchExample, rng: fedjax.PRNGKey) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    logs = jax.nn.log_softmax(batch["x"] @ params["weight"].T + params["bias"])
    return -jax.numpy.take_along_axis(logs, batch["y"][:, None], axis=1).mean()


def main() -> None:
    path, rounds = task.given()
    net, arrays = task.model(), task.arrays(path)
    datasets = [fedjax.ClientDataset({"x": x, "y": y.astype(np.int32)}) for x, y, _, _ in arrays]
    algorithm = fed_avg.federated_averaging(
        jax.grad(loss), fedjax.optimizers.sgd(task.RATE), fedjax.optimizers.sgd(1.0), BATCHES
    )
    state = algorithm.init({name: value.detach().numpy() for name, value in net.named_parameters()})
    keys = jax.random.split(jax.random.PRNGKey(0), rounds)
    for key in keys:
        clients = [
            (str(n), data, each)
            for n, (data, each) in enumerate(zip(datasets, jax.random.split(key, len(datasets)), strict=True))
        ]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)
        task.say_round()
    common = {name: torch.from_numpy(np.array(value)) for name, value in state.params.items()}
    task.say_accuracy(task.accuracy(common, task.tensors(path)))


if __name__ == "__main__":
    main()
