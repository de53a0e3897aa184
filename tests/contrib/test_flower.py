"""Flower's clients train the same model as a loop by hand: `make flower`. Without flwr only some of these tests run."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import attune
from attune.common.errors import SettingError
from attune.contrib.flower import from_flower
from attune.fedclient.console import Console
from attune.fedserver.home import ServerHome
from tests.e2e.harness import until

RATE, SIZES, ROUNDS = 0.1, (24, 32), 2
PLAIN = {"train.validation": 0.0, "round.min_clients": 2}


def samples(partition: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(partition)
    x = rng.normal(size=(SIZES[partition], 4)).astype(np.float32)
    return x, (x[:, partition] > 0).astype(int)


def shards() -> dict[str, Any]:
    return {name: samples(partition) * 2 for partition, name in enumerate(("kiel", "lund"))}  # train and test are equal


def steps(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Take three steps on all samples, and return the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(3):
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def by_hand(model: Any, data: Any, context: Any) -> float:
    """Train on the samples as Flower's client has them, which are not standardised."""
    return steps(model, *load_data(SIZES.index(len(data))))


# --- code like that of Flower's own examples: it has its own net and data, and does not know Attune


def get_weights(net: nn.Module) -> list[Any]:
    return [value.cpu().numpy() for _, value in net.state_dict().items()]


def set_weights(net: nn.Module, parameters: list[Any]) -> None:
    state = OrderedDict({key: torch.tensor(value) for key, value in zip(net.state_dict().keys(), parameters, strict=True)})
    net.load_state_dict(state, strict=True)


def load_data(partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = samples(partition)
    return torch.from_numpy(x), torch.from_numpy(y)


class Methods:
    """Calls of a NumPyClient."""

    def __init__(self, partition: int) -> None:
        self.net, (self.x, self.y) = nn.Sequential(nn.Linear(4, 2)), load_data(partition)

    def fit(self, parameters: Any, config: Any) -> Any:
        assert config["local-epochs"] == 3 and config["server_round"] >= 1
        set_weights(self.net, parameters)
        loss = steps(self.net, self.x, self.y)
        return get_weights(self.net), len(self.x), {"train_loss": loss}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        set_weights(self.net, parameters)
        loss = cross_entropy(self.net(self.x), self.y)
        accuracy = float((self.net(self.x).argmax(1) == self.y).float().mean())
        return float(loss.detach()), len(self.x), {"accuracy": accuracy}


def numpy_client(partition: int) -> Any:
    from flwr.client import NumPyClient

    return type("FlowerClient", (Methods, NumPyClient), {})(partition)


def client_fn(context: Any) -> Any:
    return numpy_client(context.node_config["partition-id"]).to_client()


def app_of_a_client_fn(partition: int) -> Any:
    from flwr.clientapp import ClientApp

    return ClientApp(client_fn=client_fn)


def app_of_functions(partition: int) -> Any:
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        net = nn.Sequential(nn.Linear(4, 2))
        set_weights(net, msg.content["arrays"].to_numpy_ndarrays())
        x, y = load_data(context.node_config["partition-id"])
        assert msg.content["config"]["local-epochs"] == 3 and msg.content["config"]["server-round"] >= 1
        context.state["rounds"] = MetricRecord({"n": context.state.metric_records.get("rounds", {"n": 0})["n"] + 1})
        metrics = {"train_loss": steps(net, x, y), "num-examples": len(x), "rounds": context.state["rounds"]["n"]}
        content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord(metrics)}
        return Message(content=RecordDict(content), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        loss, count, metrics = Methods(context.node_config["partition-id"]).evaluate(
            msg.content["arrays"].to_numpy_ndarrays(), {}
        )
        content = {"metrics": MetricRecord({"loss": loss, "num-examples": count, **metrics})}
        return Message(content=RecordDict(content), reply_to=msg)

    return app


FORMS: dict[str, Callable[[int], Any]] = {
    "NumPyClient": numpy_client,
    "Client": lambda partition: numpy_client(partition).to_client(),
    "client_fn": lambda partition: client_fn,
    "ClientApp of a client_fn": app_of_a_client_fn,
    "ClientApp of functions": app_of_functions,
}


# --- the tests


def trainings(make: Callable[[int], Any]) -> list[Any]:
    """Return the own training of each device."""
    return [
        from_flower(make(at), {"local-epochs": 3}, node_config={"partition-id": at, "num-partitions": 2}, evaluate=True)
        for at in range(2)
    ]


def simulated(train: Any, method: str = "fedavg", model: str = "mlr") -> Any:
    return attune.simulate(shards(), method, model, rounds=ROUNDS, train=train, settings=PLAIN, progress=False)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.tensors.items(), other.tensors.values(), strict=True)
    return all(torch.equal(tensor, theirs) for (_, tensor), theirs in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_flowers_client_takes_the_same_steps(form: str) -> None:
    pytest.importorskip("flwr")
    of = dict(zip(SIZES, trainings(FORMS[form]), strict=True))
    result = simulated(lambda model, data, context: of[len(data)](model, data, context))
    hand = simulated(by_hand)
    assert result.digests == hand.digests
    assert all(same(result.model(name), hand.model(name)) for name in shards())
    for size, training in of.items():
        assert [said.round for said in training.reports][:ROUNDS] == [1, 2]
        assert all(said.samples == size and said.metrics["train_loss"] > 0 for said in training.reports)
        losses = [said.evaluated[0] for said in training.reports]
        assert losses[1] < losses[0] and all(said.evaluated[1] == size for said in training.reports)
        assert all(0 < said.evaluated[2]["accuracy"] <= 1 for said in training.reports)


def test_the_state_of_an_app_lasts_from_round_to_round() -> None:
    pytest.importorskip("flwr")
    of = dict(zip(SIZES, trainings(app_of_functions), strict=True))
    simulated(lambda model, data, context: of[len(data)](model, data, context))
    assert [said.metrics["rounds"] for said in of[SIZES[0]].reports] == [1, 2]


def test_over_the_network_an_app_trains_as_in_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare to rounding, because the numbers of threads differ."""
    pytest.importorskip("flwr")
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    home, models = ServerHome(tmp_path / "server"), {}
    given: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "exit_when_done": True, "say": lambda line: None}
    server = threading.Thread(target=lambda: attune.serve("fedavg", "mlr", rounds=ROUNDS, settings=PLAIN, **given))
    server.start()
    until(home.address, "the server to listen")
    address = f"localhost:{home.address().port}"

    class Quiet(Console):
        def say(self, text: str) -> None:
            """No-op."""

    def take_part(name: str, training: Any) -> None:
        models[name] = attune.Client(address, shards()[name], name=name, device="cpu", train=training).run(Quiet())

    devices = [
        threading.Thread(target=take_part, args=each) for each in zip(shards(), trainings(app_of_a_client_fn), strict=True)
    ]
    for each in devices:
        each.start()
    for each in (*devices, server):
        each.join(60)
    hand = simulated(by_hand)
    for name in shards():
        torch.testing.assert_close(dict(models[name].tensors), dict(hand.model(name).tensors))


def test_a_numpy_client_needs_no_flwr() -> None:
    of = dict(zip(SIZES, trainings(Methods), strict=True))
    assert simulated(lambda model, data, context: of[len(data)](model, data, context)).digests == simulated(by_hand).digests


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedprox", r"adds a term to the loss, context\.penalty"),
        ("fedrod", r"trains \d+ tensors beside the model"),
        ("fedrep", r"holds \d of the model's parameters still"),
    ],
)
def test_a_method_that_needs_more_than_a_fit_says_so_before_it_trains(method: str, why: str) -> None:
    class Never(Methods):
        def fit(self, parameters: Any, config: Any) -> Any:
            raise AssertionError("never called")

    with pytest.raises(SettingError, match=f"a Flower client cannot train for this method: it {why}"):
        simulated(from_flower(Never(0), {"local-epochs": 3}), method, "dnn")


@pytest.mark.parametrize("method", ["fedmcsa", "fedper", "local"])
def test_methods_that_only_choose_weights_take_any_client(method: str) -> None:
    of = dict(zip(SIZES, trainings(Methods), strict=True))
    one, other = simulated(lambda model, data, context: of[len(data)](model, data, context), method), simulated(by_hand, method)
    assert one.digests == other.digests and all(same(one.model(name), other.model(name)) for name in shards())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda arrays: arrays[:1], r"returned 1 arrays; the model's state_dict has 2"),
        (lambda arrays: arrays[::-1], r"returned head\.weight of shape \(2,\); the model's is \(2, 4\)"),
    ],
)
def test_arrays_of_another_model_are_refused(wrong: Any, why: str) -> None:
    class Wrong(Methods):
        def fit(self, parameters: Any, config: Any) -> Any:
            return wrong(parameters), 1, {}

    with pytest.raises(SettingError, match=why):
        simulated(from_flower(Wrong(0)))


def test_what_is_no_client_is_refused() -> None:
    with pytest.raises(SettingError, match="int is no Flower client"):
        from_flower(3)


def test_without_flwr_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    with pytest.raises(SettingError, match="pip install flwr"):
        from_flower(lambda context: None)
