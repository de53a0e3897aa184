"""Flower's simulation by its Ray backend, with a processor for each client (requirements: flower.txt)."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.contenders import task

PATH, ROUNDS = task.given()


class Stamped(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        found = super().aggregate_train(server_round, replies)
        task.say_round()
        return found


def client_app() -> ClientApp:
    app, path = ClientApp(), PATH
    held: dict[str, Any] = {}  # in each of Flower's processes

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if not held:
            torch.set_num_threads(1)
            held["devices"] = task.tensors(path)
        number = int(context.node_config["partition-id"])
        x, y, _, _ = held["devices"][number]
        net = task.model(x.shape[1:])
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        task.train(net, x, y, int(message.content["config"]["server-round"]) * len(held["devices"]) + number)
        metrics = MetricRecord({"num-examples": len(x)})
        return Message(content=RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)

    return app


def main() -> None:
    devices = task.tensors(PATH)
    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        strategy = Stamped(fraction_evaluate=0.0, min_train_nodes=len(devices), min_available_nodes=len(devices))
        first = ArrayRecord(task.model(devices[0][0].shape[1:]).state_dict())
        result = strategy.start(grid=grid, initial_arrays=first, num_rounds=ROUNDS)
        task.say_accuracy(task.accuracy(result.arrays.to_torch_state_dict(), devices))

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client_app(), len(devices), backend_config=backend)


if __name__ == "__main__":
    main()
