"""Cost of a stalling device to an honest fleet: its rounds beside those of a quiet run, with real servers, in one script.

`make stalling` writes benchmarks/results/stalling.json. The quiet federation and one federation for each attack run side by
side for an hour, so that the load of the machine is the same for all of them. A stalling device costs a part at the beginning,
until the server no longer waits for it, and a part again when its debt is paid, after 20 times what it has cost. The file has
the rounds of every tenth of the span, so a reader sees when the time was lost.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from safetensors.numpy import save

from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from tests.e2e.hand import Hand, Stream
from tests.e2e.harness import Federation

SPAN_S, TAKES_S, HONEST, PARTS = 3600.0, 1.0, 3, 10
SETTINGS = {"round.deadline_s": 30.0, "round.grace_s": 5.0, "round.evaluate_every": 2, "server.inline_bytes": 0}
Stall = Callable[["Device", pb.Order, int], bool]  # whether the device answers its order of this number


class Device(threading.Thread):
    """A device on a thread, which says that it lives. Without `stall` it is honest."""

    def __init__(self, port: int, token: str, name: str, stall: Stall | None = None) -> None:
        super().__init__(daemon=True)
        self.hand, self.stall, self.ended, self.trained = Hand(port, token, name), stall, False, 0
        self.stream: Stream = self.hand.connect()
        threading.Thread(target=self._live, daemon=True).start()
        self.start()

    def run(self) -> None:
        number = 0
        while not self.ended:
            try:
                order = self.stream.next("order")
                number += 1
                if self.stall is None:
                    time.sleep(TAKES_S)
                if self.stall is None or self.stall(self, order, number):
                    self.answer(order)
            except (grpc.RpcError, AssertionError, KeyError):
                if self.ended:
                    return

    def answer(self, order: pb.Order) -> None:
        if order.work == pb.WORK_TRAIN:
            self.hand.answer(order, 0.01)
            self.trained += 1
        else:
            self.hand.submit(order.id, samples=0, loss=0.5, accuracy_before=0.5, test_samples=5)

    def progress(self, order: pb.Order) -> None:
        self.stream.say(progress=pb.Progress(order_id=order.id, done=0.5))

    def end(self) -> None:
        self.ended = True
        self.stream.hang_up()

    def _live(self) -> None:
        while not self.ended:
            self.stream.say(beat=pb.Beat(every_s=2))
            time.sleep(1)


def evalstall(device: Device, order: pb.Order, number: int) -> bool:
    """Train, and never answer an evaluation."""
    return order.work == pb.WORK_TRAIN


def hold(device: Device, order: pb.Order, number: int) -> bool:
    """Answer every third order, and report progress for the others."""
    device.progress(order)
    return number % 3 == 0


def slow(device: Device, order: pb.Order, number: int) -> bool:
    """Upload one byte each two seconds."""
    if order.work != pb.WORK_TRAIN:
        return True
    data = save(device.hand.served(order)["shared"])

    def drip() -> Iterator[bytes]:
        for start in range(len(data)):
            yield data[start : start + 1]
            device.progress(order)
            time.sleep(2)

    device.hand.upload(order.id, "shared", drip(), digest_of(data), len(data))
    return False


def alternating(device: Device, order: pb.Order, number: int) -> bool:
    """Train and never evaluate for five orders, then the other way round."""
    device.progress(order)
    return (order.work == pb.WORK_TRAIN) == (number // 5 % 2 == 0)


ATTACKS: tuple[Stall, ...] = (evalstall, hold, slow, alternating)


def rounds(folder: Path, stall: Stall | None, span_s: float) -> list[int]:
    """Return the closed rounds after each tenth of the span, with three honest devices.

    The stalling device is there before round 1.
    """
    federation = Federation(folder)
    flags = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    server = federation.server("--method", "fedavg", "--model", "mlr", "--rounds", "100000", "--min-clients", "3", *flags)
    devices = [Device(server.port, server.join_token, "eve", stall)] if stall else []
    devices += [Device(server.port, server.join_token, f"honest{number}") for number in range(HONEST)]
    start, closed = time.monotonic(), []
    for part in range(1, PARTS + 1):
        time.sleep(max(0.0, start + span_s * part / PARTS - time.monotonic()))
        closed.append(int(federation.status()["round"]))
        print(f"{folder.name}: {closed[-1]} rounds after {span_s * part / PARTS:.0f} s", flush=True)
    for device in devices:
        device.end()
    federation.close()
    return closed


def cost(quiet: list[int], attacked: list[int]) -> dict[str, Any]:
    """Return the share of its rounds that an attack costs the fleet."""
    return {"rounds": attacked, "cost": round(max(0.0, 1 - attacked[-1] / quiet[-1]), 3)}


def main(out: Path, span_s: float = SPAN_S) -> None:
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(1 + len(ATTACKS)) as pool:
        runs: list[Stall | None] = [None, *ATTACKS]
        names = [stall.__name__ if stall else "quiet" for stall in runs]
        folders = [Path(scratch) / name for name in names]
        quiet, *attacked = pool.map(rounds, folders, runs, [span_s] * len(runs))
    table = {name: cost(quiet, closed) for name, closed in zip(names[1:], attacked, strict=True)}
    command = "python -m tests.attacks.stalling benchmarks/results/stalling.json"
    result = {"command": command, "span_s": span_s, "settings": SETTINGS, "quiet_rounds": quiet, "attacks": table}
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
