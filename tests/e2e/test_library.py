"""`attune.serve` and `attune.Client`: the same federation as with the commands, from one Python program."""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attune
from attune.common import aio, faults
from attune.common.errors import NotEnrolled, SettingError
from attune.fedclient.console import Console
from attune.fedserver.home import ServerHome
from attune.fedserver.view.homes import status_of
from tests.e2e.harness import until

SETTINGS = {"train.local_epochs": 1, "round.min_clients": 2}


def cloud(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, 40)
    return (np.eye(4)[y] * 9 + rng.normal(size=(40, 4))).astype(np.float32), y


class Quiet(Console):
    def say(self, text: str) -> None:
        """No-op."""


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start work on a thread, and return a function that waits for its end and returns its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()

    def join() -> Any:
        thread.join(60)
        return found[0]

    return join


def test_a_federation_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    home, said = ServerHome(tmp_path / "server"), []
    server = in_thread(
        lambda: attune.serve(
            "fedavg", "mlr", rounds=2, settings=SETTINGS, host="127.0.0.1", port=0, exit_when_done=True, say=said.append
        )
    )
    until(home.address, "the server to listen")
    address = f"localhost:{home.address().port}"
    devices = [attune.Client(address, cloud(n), name=f"site{n}", device="cpu") for n in range(2)]

    async def notebook() -> Any:
        return devices[0].run(Quiet())

    other = in_thread(lambda: devices[1].run(Quiet()))
    models = [aio.run(notebook()), other()]
    server()
    assert status_of(home)["state"] == "done"
    assert any(line.startswith("fedserver listens") for line in said)
    simulated = attune.simulate({f"site{n}": cloud(n) for n in range(2)}, "fedavg", "mlr", rounds=2, settings=SETTINGS)
    x, _ = cloud(7)
    for n, model in enumerate(models):
        assert model.info.name == f"site{n}"
        assert model.predict(x) == simulated.model(f"site{n}").predict(x)
    assert (tmp_path / "devices" / address.replace(":", "_") / "site0" / "model" / "model.json").exists()


class Watching(Quiet):
    """Console that notes that training has begun."""

    def __init__(self) -> None:
        self.began = threading.Event()

    def progress(self, what: str, done: float) -> None:
        self.began.set()


def test_a_client_is_stopped_by_another_thread_and_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    monkeypatch.setattr("attune.fedclient.device.PROGRESS_S", 0.0)
    home, settings = ServerHome(tmp_path / "server"), SETTINGS | {"train.local_epochs": 40, "round.replace_after_s": -1}
    words: dict[str, Any] = {"settings": settings, "host": "127.0.0.1", "port": 0, "exit_when_done": True}
    server = in_thread(lambda: attune.serve("fedavg", "mlr", rounds=2, say=lambda line: None, **words))
    until(home.address, "the server to listen")
    address = f"localhost:{home.address().port}"
    first, second = (attune.Client(address, cloud(n), name=f"site{n}", device="cpu") for n in range(2))
    other, watched = in_thread(lambda: second.run(Quiet())), Watching()

    def stopped(console: Console) -> str:
        with pytest.raises(CancelledError) as error:
            first.run(console)
        return str(error.value)

    monkeypatch.setattr(faults, "_armed", [])
    faults.arm("site0:*:training=sleep:0.1")
    ended = in_thread(lambda: stopped(watched))
    assert watched.began.wait(60)
    first.stop()
    first.stop()  # a second time does no more
    assert ended() == "this device was stopped; finished work is saved, run it again to go on"
    faults.arm("")
    first.stop()  # before it runs: the next run ends at once
    assert "run it again" in stopped(Quiet())
    models = [first.run(Quiet()), other()]
    server()
    simulated = attune.simulate({f"site{n}": cloud(n) for n in range(2)}, "fedavg", "mlr", rounds=2, settings=settings)
    for n, model in enumerate(models):
        assert (model.probabilities(cloud(7)[0]) == simulated.model(f"site{n}").probabilities(cloud(7)[0])).all()


def test_data_without_a_file_need_a_name() -> None:
    with pytest.raises(SettingError, match="name="):
        attune.Client("localhost:1", cloud(0))


def test_a_device_without_a_token_hears_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    with pytest.raises(NotEnrolled, match="fedserver token"):
        attune.Client("nowhere.example:1", cloud(0), name="site0", device="cpu").run(Quiet())


def test_code_that_may_run_is_named_or_handed_over() -> None:
    def names(model: Any) -> tuple[str, ...]:
        return attune.Client("localhost:1", "shard", model).options.allow_models

    assert names(()) == ()
    assert names("a.b:c") == ("a.b:c",)
    assert names(cloud) == (f"{__name__}:cloud",)
    assert names(["a.b:c", cloud]) == ("a.b:c", f"{__name__}:cloud")
