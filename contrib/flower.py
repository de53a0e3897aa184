"""A bridge to Flower: its `NumPyClient`, `client_fn` or `ClientApp` trains a device, unchanged.

Flower (flwr) is imported when it is needed, and a NumPyClient does without it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from attune.common.errors import SettingError

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

    from attune.fedclient.work.own_loop import Context

Arrays = dict[str, npt.NDArray[Any]]  # in the order of the model's state_dict
Config = Mapping[str, Any]
NOTHING: Config = {}
LOSSES = ("loss", "train_loss", "train-loss")  # metrics that are taken for the loss of the training


@dataclass(frozen=True)
class FlowerReport:
    """Report of a Flower client on one round.

    Attributes:
        round: The federation's round.
        stage: Which of the method's trainings of that round it was.
        samples: How many samples it trained on.
        metrics: As its `fit` returned them.
        evaluated: (loss, samples, metrics) of the model before the training, if that was asked for.
    """

    round: int
    stage: str
    samples: int | None
    metrics: dict[str, Any] = field(default_factory=dict)
    evaluated: tuple[float | None, int | None, dict[str, Any]] | None = None


class _FlowerClient(Protocol):
    """A Flower client, called with arrays. Both methods return a result, the number of samples and metrics."""

    def fit(self, arrays: Arrays, config: Config, round_: int) -> tuple[Arrays, int | None, dict[str, Any]]: ...

    def evaluate(self, arrays: Arrays, config: Config, round_: int) -> tuple[float | None, int | None, dict[str, Any]]: ...


class FlowerTraining:
    """The `train` of an `attune.Client` or of `attune.simulate`; `reports` has what the client reported, round by round."""

    def __init__(self, side: _FlowerClient, config: Config | Callable[[int], Config], evaluate: bool) -> None:
        self._side, self._config, self._evaluate = side, config, evaluate
        self.reports: list[FlowerReport] = []

    def __repr__(self) -> str:
        return f"<FlowerTraining by {self._side!r}>"

    def __call__(self, model: nn.Module, data: Any, context: Context) -> float | None:
        """Call the client's `fit` once.

        Raises:
            SettingError: The method needs more than a plain training, or the client returned arrays of another model.
        """
        if context.needs:
            raise SettingError(
                f"a Flower client cannot train for this method: {context.needs}. Choose a method that adds nothing to the "
                "training (fedavg, fedper, fedtp, fedmcsa with mu = 0), or write train(model, data, context)"
            )
        config = dict(self._config(context.round) if callable(self._config) else self._config)
        arrays = {name: tensor.detach().cpu().numpy().copy() for name, tensor in model.state_dict().items()}
        context.progress(0.0)
        evaluated = self._side.evaluate(arrays, config, context.round) if self._evaluate else None
        trained, samples, metrics = self._side.fit(arrays, config, context.round)
        _load(model, trained)
        self.reports.append(FlowerReport(context.round, context.stage, samples, metrics, evaluated))
        context.progress(1.0)
        return next((float(metrics[name]) for name in LOSSES if name in metrics), None)


def from_flower(
    client: Any,
    config: Config | Callable[[int], Config] = NOTHING,
    node_config: Config = NOTHING,
    run_config: Config = NOTHING,
    evaluate: bool = False,
) -> FlowerTraining:
    """Make a device's training from a Flower client: `attune.Client(..., train=from_flower(client))` (docs/own-training.md).

    Args:
        client: A NumPyClient, a Client, a ClientApp or a client_fn(context).
        config: What `fit` is given beside the round's number, or a function of that number.
        node_config: As in Flower's Context, such as {"partition-id": 0}.
        run_config: As in Flower's Context.
        evaluate: Ask for the client's own evaluation too, before each training.

    Raises:
        SettingError: It is no Flower client, or Flower is not installed.
    """
    side: _FlowerClient
    if _is("ClientApp", client):
        side = _App(client, node_config, run_config)
    elif callable(getattr(client, "fit", None)) and not _is("Client", client):
        side = _NumPy(client)
    elif _is("Client", client):
        side = _App(_flwr().ClientApp(client_fn=lambda context: client), node_config, run_config)
    elif callable(client):
        side = _App(_flwr().ClientApp(client_fn=client), node_config, run_config)
    else:
        raise SettingError(f"{type(client).__name__} is no Flower client: give a NumPyClient, a ClientApp or a client_fn")
    return FlowerTraining(side, config, evaluate)


class _NumPy:
    """A NumPyClient, or any object with its `fit` and `evaluate`."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __repr__(self) -> str:
        return type(self._client).__name__

    def fit(self, arrays: Arrays, config: Config, round_: int) -> tuple[Arrays, int | None, dict[str, Any]]:
        trained, samples, metrics = self._client.fit(list(arrays.values()), {"server_round": round_, **config})
        return _numbered(trained), samples, metrics

    def evaluate(self, arrays: Arrays, config: Config, round_: int) -> tuple[float | None, int | None, dict[str, Any]]:
        loss, samples, metrics = self._client.evaluate(list(arrays.values()), {"server_round": round_, **config})
        return loss, samples, metrics


class _App:
    """A ClientApp, with functions for messages or around a client_fn. Its Context, and so its state, lives as long as this."""

    def __init__(self, app: Any, node_config: Config, run_config: Config) -> None:
        from flwr.app import Context, RecordDict

        self._app = app
        self._of_clients = getattr(app, "_call", None) is not None  # around a client_fn: messages have other keys
        self._context = Context(1, 1, dict(node_config), RecordDict(), dict(run_config))

    def __repr__(self) -> str:
        return "a ClientApp"

    def fit(self, arrays: Arrays, config: Config, round_: int) -> tuple[Arrays, int | None, dict[str, Any]]:
        reply = self._asked("train", "fitins", arrays, config, round_)
        made = list(reply.array_records.values())
        if len(made) != 1:
            raise SettingError(f"the Flower app answered with {len(made)} records of arrays; one is needed, the trained model")
        samples, metrics = _metrics_of(reply)
        return {name: array.numpy() for name, array in made[0].items()}, samples, metrics

    def evaluate(self, arrays: Arrays, config: Config, round_: int) -> tuple[float | None, int | None, dict[str, Any]]:
        samples, metrics = _metrics_of(self._asked("evaluate", "evaluateins", arrays, config, round_))
        return metrics.pop("loss", None), samples, metrics

    def _asked(self, what: str, legacy: str, arrays: Arrays, config: Config, round_: int) -> RecordDict:
        from flwr.app import DEFAULT_TTL, Array, ArrayRecord, ConfigRecord, Message, Metadata, RecordDict

        prefix, number = (f"{legacy}.", "server_round") if self._of_clients else ("", "server-round")
        named = _numbered(list(arrays.values())) if self._of_clients else arrays
        content = RecordDict(
            {
                f"{prefix}{'parameters' if prefix else 'arrays'}": ArrayRecord(
                    {name: Array(array) for name, array in named.items()}
                ),
                f"{prefix}config": ConfigRecord({number: round_, **config}),
            }
        )
        # Without this metadata the message would ask Flower's runtime for its own, and there is none here.
        metadata = Metadata(1, "", 1, 1, "", "", time.time(), DEFAULT_TTL, what)
        reply: Message = self._app(Message(content, metadata=metadata), self._context)
        if reply.has_error():
            raise SettingError(f"the Flower app could not {what}: {reply.error.reason}")
        return reply.content


def _metrics_of(reply: RecordDict) -> tuple[int | None, dict[str, Any]]:
    """Return the number of samples and the metrics of a reply, in either form."""
    records = {**reply.config_records, **reply.metric_records}
    metrics = {key: value for name, record in records.items() if not name.endswith(".status") for key, value in record.items()}
    samples = metrics.pop("num-examples", metrics.pop("num_examples", None))
    return samples, metrics


def _numbered(arrays: Any) -> Arrays:
    return {str(position): np.asarray(array) for position, array in enumerate(arrays)}


def _load(model: nn.Module, arrays: Arrays) -> None:
    """Load the arrays into the model by name, or else by position.

    Raises:
        SettingError: They are not the model's.
    """
    state = model.state_dict()
    if arrays.keys() != state.keys():
        if len(arrays) != len(state):
            raise SettingError(f"the Flower client returned {len(arrays)} arrays; the model's state_dict has {len(state)}")
        arrays = dict(zip(state, arrays.values(), strict=True))
    with torch.no_grad():
        for name, tensor in state.items():
            if arrays[name].shape != tuple(tensor.shape):
                raise SettingError(
                    f"the Flower client returned {name} of shape {arrays[name].shape}; the model's is {tuple(tensor.shape)}"
                )
            tensor.copy_(torch.as_tensor(arrays[name]))


def _is(kind: str, client: Any) -> bool:
    """Return whether this is a ClientApp or Client of Flower, without importing Flower for it."""
    return "flwr" in sys.modules and isinstance(client, getattr(_flwr(), kind))


def _flwr() -> Any:
    try:
        import flwr.client
    except ImportError:
        raise SettingError("a ClientApp or client_fn needs Flower: pip install flwr") from None
    return flwr.client
