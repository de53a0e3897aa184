"""Flower's server: FedAvg over arrays of the given size. It prints when each round's mean was taken."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Stamped(FedAvg):
    """FedAvg that prints the time when a round's updates are aggregated."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        found = super().aggregate_train(server_round, replies)
        print(f"freight-round {server_round} {time.time():.4f}", flush=True)
        return found


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    clients, parameters, tensors = (int(config[name]) for name in ("clients", "parameters", "tensors"))
    draw = np.random.default_rng(0)
    arrays = [part.astype(np.float32) for part in np.array_split(draw.standard_normal(parameters), tensors)]
    strategy = Stamped(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(arrays), num_rounds=int(config["rounds"]))
