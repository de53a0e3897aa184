"""Bounds on what a peer makes the server write: lines of the log and rows of the database, for every kind of message."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import msgspec
import numpy as np
import pytest

from attune.common.pb import federation_pb2 as pb
from tests.attacks.conftest import FLAGS, Victim
from tests.e2e.hand import PROFILE, kind_of, moved
from tests.e2e.harness import Federation, until

MOST_BYTES = 100_000  # that one device may make the server write within a minute, in the log and in the database
TIMES = 600
LONG = "x" * 500


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """Run a federation of two silent devices and Eve, whose messages do not change another test's victim."""
    federation = Federation(Path(tmp_path_factory.mktemp("flooded")))
    victim = Victim(federation, federation.server(*FLAGS))
    for name in ("ada", "bob", "eve"):
        victim.devices[name] = victim.device(name)
        victim.streams[name] = victim.devices[name].connect()
    for name, stream in victim.streams.items():
        victim.orders[name] = stream.next("order")
    yield victim
    federation.close()


def written(victim: Victim) -> int:
    files = ("audit.jsonl", "state.sqlite")
    return len(victim.server.text) + sum((victim.federation.home / name).stat().st_size for name in files)


def says(victim: Victim, message: Callable[[int], pb.DeviceMessage]) -> None:
    """Send so many messages on Eve's stream, and wait until the server has read the last one."""
    eve = victim.devices["eve"]
    stream = eve.connect()
    stream.next("welcome")
    for number in range(TIMES):
        stream.say(**{name.name: value for name, value in message(number).ListFields()})
    stream.say(trouble=pb.Trouble(reason="the last one"))
    stream.end_of_input()
    with contextlib.suppress(grpc.RpcError):
        stream.end()


def trouble_without_an_order(victim: Victim) -> None:
    says(victim, lambda number: pb.DeviceMessage(trouble=pb.Trouble(reason=f"{number} {LONG}")))


def trouble_with_an_order(victim: Victim) -> None:
    order = victim.orders["eve"].id
    says(victim, lambda number: pb.DeviceMessage(trouble=pb.Trouble(order_id=order, reason=f"{number} {LONG}")))


def progress_back_and_forth(victim: Victim) -> None:
    order = victim.orders["eve"].id
    says(victim, lambda number: pb.DeviceMessage(progress=pb.Progress(order_id=order, done=number % 4 / 4)))


def come_and_go(victim: Victim) -> None:
    for _ in range(TIMES // 6):
        stream = victim.devices["eve"].connect()
        stream.next("welcome")
        stream.hang_up()


def come_with_another_shape(victim: Victim) -> None:
    for _ in range(TIMES // 6):
        stream = victim.devices["eve"].connect(msgspec.structs.replace(PROFILE, shape=(9,)))
        assert kind_of(stream.end) == "shape-mismatch"


def updates_full_of_nan(victim: Victim) -> None:
    eve, order = victim.devices["eve"], victim.orders["eve"]
    served = eve.served(order)
    for _ in range(TIMES // 6):
        parts = [eve.send(order.id, part.part, moved(served[part.part], np.nan)) for part in order.returns]
        assert kind_of(lambda parts=parts: eve.submit(order.id, parts)) == "not-finite"


def updates_for_orders_that_do_not_exist(victim: Victim) -> None:
    for number in range(TIMES):
        with contextlib.suppress(grpc.RpcError):
            assert victim.devices["eve"].submit(f"train-{number}-eve").status != pb.Receipt.STATUS_ACCEPTED


@pytest.mark.parametrize(
    "attack",
    [
        trouble_without_an_order, trouble_with_an_order, progress_back_and_forth, come_and_go, come_with_another_shape,
        updates_full_of_nan, updates_for_orders_that_do_not_exist,
    ],
)  # fmt: skip
def test_one_device_makes_the_server_write_little(flooded: Victim, attack: Callable[[Victim], None]) -> None:
    before = written(flooded)
    attack(flooded)
    until(lambda: flooded.federation.status()["state"] != "done", "the server to answer")
    assert written(flooded) - before < MOST_BYTES
    assert flooded.server.popen.poll() is None
    assert "Traceback" not in flooded.server.text
