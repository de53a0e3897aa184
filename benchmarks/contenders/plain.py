"""A loop of plain PyTorch, as in the code of many papers."""

from __future__ import annotations

import torch

from benchmarks.contenders import task


def main() -> None:
    path, rounds = task.given()
    devices = task.tensors(path)
    net = task.model(devices[0][0].shape[1:])
    common = {name: value.clone() for name, value in net.state_dict().items()}
    for round_ in range(rounds):
        total = {name: torch.zeros_like(value) for name, value in common.items()}
        for number, (x, y, _, _) in enumerate(devices):
            net.load_state_dict(common)
            task.train(net, x, y, round_ * len(devices) + number)
            for name, value in net.state_dict().items():
                total[name] += value / len(devices)
        common = total
        task.say_round()
    task.say_accuracy(task.accuracy(common, devices))


if __name__ == "__main__":
    main()
