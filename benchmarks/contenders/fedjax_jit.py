"""FedJAX's federated averaging with its default backend, which compiles a client's step (requirements: fedjax.txt)."""

from __future__ import annotations

import fedjax
import jax
import numpy as np
import torch
from fedjax.algorithms import fed_avg

from benchmarks.contenders import task

BATCHES = fedjax.ShuffleRepeatBatchHParams(batch_size=task.BATCH, num_epochs=None, num_steps=task.STEPS)


def _convolved(params: fedjax.Params, layer: int, x: jax.Array) -> jax.Array:
    """Return a padded 3 x 3 convolution with ReLU and a pooling of 2 x 2; layers are numbered as in torch's module."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
    x = jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    x = jax.nn.relu(x + bias[:, None, None])
    return jax.lax.reduce_window(x, -jax.numpy.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def scores(params: fedjax.Params, x: jax.Array) -> jax.Array:
    """Return the scores (B, classes) of the task's model with torch's names of parameters."""
    if "weight" in params:
        return x @ params["weight"].T + params["bias"]
    x = _convolved(params, 3, _convolved(params, 0, x))
    return x.reshape(len(x), -1) @ params["7.weight"].T + params["7.bias"]


def loss(params: fedjax.Params, batch: fedjax.BatchExample, rng: fedjax.PRNGKey) -> jax.Array:
    """Return the mean cross-entropy of a batch."""
    logs = jax.nn.log_softmax(scores(params, batch["x"]))
    return -jax.numpy.take_along_axis(logs, batch["y"][:, None], axis=1).mean()


def main() -> None:
    path, rounds = task.given()
    arrays = task.arrays(path)
    net = task.model(arrays[0][0].shape[1:])
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
