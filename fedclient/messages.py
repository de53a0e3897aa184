"""A device's result, and what its session is told (events, with the server's messages among them) and answers (effects)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from attune.common.exchange.messages import Order, SecureMessage, StatisticsRequest, ToDevice
from attune.common.metrics import RIVALS, Choice, Metrics
from attune.common.task import ScoredTask


class SmallerFormUnusable(Exception):
    """Error for a served value whose smaller form cannot be used. The value itself can still be fetched."""


class Rested(Exception):
    """Signal that a device had no work for a while: its session, and its first message on a new stream."""


class Part(msgspec.Struct, frozen=True):
    """One blob of the update."""

    part: str
    digest: str  # ALGORITHM:HEX
    size: int  # bytes
    version: int = 0  # of the value that its training began from


class OrderResult(Metrics, frozen=True, kw_only=True):
    """update.json: what carrying out an order came to."""

    order_id: str
    round: int
    trained: bool
    samples: int  # training samples
    task: ScoredTask = "classes"
    own_choice: Choice = msgspec.field(name="own", default="personalized")  # the model that the method leads to on this device
    validation_samples: int = 0  # by which the weights were found; 0: there were none
    weights: Mapping[str, float] = msgspec.field(default_factory=dict)  # of a blend; a model alone has none
    sharpness: Mapping[str, float] = msgspec.field(default_factory=dict)  # of each of its models (Member)
    cases: int | None = None  # test samples of the rarer of two classes; groups count once. It stays here
    threshold: float | None = None  # likewise: ModelInfo.threshold
    parts: tuple[Part, ...] = ()
    served: Mapping[str, str] = msgspec.field(default_factory=dict)  # part -> digest of what received.safetensors holds of it
    versions: Mapping[str, int] = msgspec.field(default_factory=dict)  # part -> version of what was last received of it
    sequence: int = 0
    charged: int = 0  # training orders with noise of this run, this one included
    files: Mapping[str, str] = msgspec.field(default_factory=dict)  # file beside this one -> digest
    encodings: Mapping[str, str] = msgspec.field(default_factory=dict)  # of what was handed in, as in the order
    state_parts: tuple[str, ...] = ()  # parts handed in whose files are part of the state
    noisy: Mapping[str, float] = msgspec.field(
        default_factory=dict
    )  # metrics of training with noise, in place of the real ones
    of_samples: bool = False  # what is handed in are sums over samples, which depend on nothing that was served
    check: str = ""  # digest of all the rest of this file

    @property
    def choice(self) -> Choice:
        """Which model the device predicts with, or counts most."""
        return self.kept or self.own_choice

    @property
    def accuracies(self) -> dict[Choice, float | None]:
        """Accuracy of each model that the device could keep, on its test part."""
        own_accuracy = self.accuracy_after if self.trained else self.accuracy_before
        others: dict[Choice, float | None] = {name: getattr(self, names.accuracy) for name, names in RIVALS.items()}
        return {self.own_choice: own_accuracy} | {name: value for name, value in others.items() if name != self.own_choice}

    @property
    def accuracy(self) -> float | None:
        """Accuracy of the model with which the device predicts."""
        return self.accuracies.get(self.choice) if self.accuracy_kept is None else self.accuracy_kept

    @property
    def no_better_than_constant(self) -> bool:
        """True if what it predicts with has no better score than a constant answer, where that is not the best there is."""
        if self.accuracy is None or self.accuracy_constant is None:
            return False
        return self.accuracy <= self.accuracy_constant < 1


# --- events: what happened -------------------------------------------------------------------------------------------------


class StreamOpened(msgspec.Struct, frozen=True):
    """The control stream is open."""


class Broke(msgspec.Struct, frozen=True):
    """The stream is gone, or could not be opened. Seconds since the server was last heard, and for how long it was open."""

    reason: str
    silent_s: float
    lived_s: float = 0.0


class Displaced(msgspec.Struct, frozen=True):
    """The server closed the stream, because another was opened with this device's certificate. `lived_s` as in Broke."""

    reason: str
    lived_s: float = 0.0


class WorkDone(msgspec.Struct, frozen=True):
    """The order's result is durable on disk."""

    order_id: str


class WorkFailed(msgspec.Struct, frozen=True):
    """The present work failed."""

    order_id: str
    reason: str


class Sent(msgspec.Struct, frozen=True):
    """A result was handed in. `late`: it does not count."""

    order_id: str
    late: bool


class SendRefused(msgspec.Struct, frozen=True):
    """A result could not be handed in. `known`: the server has refused it, and no longer waits for it."""

    order_id: str
    reason: str
    known: bool = False


class Expired(msgspec.Struct, frozen=True):
    """The order's deadline has passed."""

    order_id: str


Event = StreamOpened | ToDevice | Broke | Displaced | WorkDone | WorkFailed | Sent | SendRefused | Expired

# --- effects: what to do ---------------------------------------------------------------------------------------------------


class Say(msgspec.Struct, frozen=True):
    """Print a line."""

    text: str


class Prepare(msgspec.Struct, frozen=True):
    """Build the model and tensors for this plan, or refuse it."""

    plan_json: bytes


class Start(msgspec.Struct, frozen=True):
    """Start an order."""

    order: Order


class Extend(msgspec.Struct, frozen=True):
    """The order at hand came again: its deadline counts from now."""

    order: Order


class StopWork(msgspec.Struct, frozen=True):
    """Stop the present work."""

    order_id: str


class Send(msgspec.Struct, frozen=True):
    """Upload and submit. `resume`: the server may hold some of it already."""

    order_id: str
    resume: bool


class Exchange(msgspec.Struct, frozen=True):
    """Answer a message of secure aggregation."""

    message: SecureMessage


class Disclose(msgspec.Struct, frozen=True):
    """Answer a question for statistics of the data."""

    question: StatisticsRequest


class StopSending(msgspec.Struct, frozen=True):
    """Stop handing in."""

    order_id: str


class ReportTrouble(msgspec.Struct, frozen=True):
    """Tell the server that an order cannot be carried out."""

    order_id: str
    reason: str


class Reconnect(msgspec.Struct, frozen=True):
    """Open the stream again after this long (the caller adds jitter)."""

    after_s: float


class GiveUp(msgspec.Struct, frozen=True):
    """End the device with an error."""

    reason: str


class Yield(msgspec.Struct, frozen=True):
    """Another process is this device now: end, and leave it to that one."""

    reason: str


class Refuse(msgspec.Struct, frozen=True):
    """The server contradicts what it said before: stop rather than guess."""

    reason: str


class Keep(msgspec.Struct, frozen=True):
    """The federation is over: write the finished model and end."""

    message: str


class AskForModel(msgspec.Struct, frozen=True):
    """The federation is over, and this device holds no state of it: leave the stream, and say so on the next."""


Effect = (
    AskForModel
    | Say
    | Prepare
    | Start
    | Extend
    | StopWork
    | Send
    | Exchange
    | Disclose
    | StopSending
    | ReportTrouble
    | Reconnect
    | GiveUp
    | Yield
    | Refuse
    | Keep
)
