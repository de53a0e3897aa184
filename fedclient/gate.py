"""Gate for all that leaves a device: a field is sent only where its row of disclosed.toml allows it. No row means no."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from msgspec.structs import FieldInfo, fields

from attune.common.durable import read_small
from attune.common.errors import AttuneError, DiskFull, Forbidden, HomeMismatch, LimitExceeded, NoModel, SettingError, WireError
from attune.common.exchange.messages import Order
from attune.common.exchange.registry import SecureSumSettings, secure_sum_in
from attune.common.given_model import MOST_BYTES, read_network
from attune.common.methods.method import SOLVED
from attune.common.metrics import Metrics
from attune.common.plan import FEWEST_DEVICES, Plan, Profile
from attune.common.protocol import SPENT
from attune.common.text import converted
from attune.fedclient.messages import OrderResult

if TYPE_CHECKING:
    from torch import Tensor

    from attune.fedclient.options import DeviceOptions


class DisclosureRow(msgspec.Struct, forbid_unknown_fields=True):
    """Decision about some fields: a row of disclosed.toml, which says what the words of its three modes mean."""

    name: str
    fields: list[str]
    sees: str
    why: str
    usual: str
    noise: str
    secure: str


@cache
def decisions() -> list[DisclosureRow]:
    """Return all decisions, in the order of the table."""
    table = Path(__file__).with_name("disclosed.toml").read_bytes()
    return converted(msgspec.toml.decode(table)["decision"], list[DisclosureRow])


@cache
def rows() -> Mapping[str, DisclosureRow]:
    """Return the decision about each field."""
    return {field: decision for decision in decisions() for field in decision.fields}


@dataclass(frozen=True)
class PrivacyLimits:
    """Demands of a device's owner on the privacy of its samples.

    Attributes:
        epsilon: Most epsilon that these data may be charged in all; None: no limit, and training without noise is allowed.
        delta: Largest delta; None: no limit, but with `epsilon` 1 / samples: a larger one may show a sample as it is.
        samples: Fewest training samples with which the device takes part.
        metrics: What the server is told of losses and scores. None: all of it without noise in training, nothing with it.
            noisy: those of training, with noise that is charged.
        devices: Fewest devices of whose updates the server learns the sum alone; 0: it may read single updates.
        new_data: Data with another digest than before are of other people, so nothing was spent on them.
    """

    epsilon: float | None = None
    delta: float | None = None
    samples: int = 0
    metrics: Literal["none", "noisy", "all"] | None = None
    new_data: bool = False
    devices: int = 0

    def __post_init__(self) -> None:
        for name, bound in (("epsilon", self.epsilon), ("delta", self.delta)):
            if bound is not None and not math.isfinite(bound):  # no plan would ever be above it
                raise SettingError(f"--max-{name} is a finite number, not {bound}; without the option there is no bound")

    @property
    def needs_noise(self) -> bool:
        """True if what depends on single samples may leave the device only with noise."""
        return self.epsilon is not None or self.delta is not None

    def most_delta(self, samples: int) -> float:
        """Return the largest delta for a device with so many training samples; infinite without a limit."""
        if self.delta is not None:
            return self.delta
        return math.inf if self.epsilon is None else 1 / max(1, samples)

    def check_plan(self, plan: Plan, samples: int) -> None:
        """Check a plan before anything is trained. The privacy ledger checks what it costs.

        Raises:
            LimitExceeded: The plan asks for more; the message has the option that allows it.
        """
        if samples < self.samples:
            raise LimitExceeded(
                f"this device has {samples} training samples; it takes part from {self.samples} on (--min-samples)"
            )
        secure = secure_sum_in(plan.transforms)
        if (least := secure.devices if secure else 1) < self.devices:
            raise LimitExceeded(
                f"this federation's server reads sums of {least} updates (privacy.secure_aggregation, privacy.secure_devices); "
                f"this device hands in to sums of at least {self.devices} (--min-devices)"
            )
        asks = plan.privacy if plan.is_private else None
        if asks is None and self.metrics == "noisy":
            raise LimitExceeded(
                "this federation's devices train without noise (privacy.unit), so no budget pays for noise on "
                "their metrics; say --metrics none, or all"
            )
        if asks is None and self.needs_noise:
            raise LimitExceeded(
                "this federation's devices train without noise (privacy.unit); this device allows that only without "
                "--max-epsilon and --max-delta"
            )
        if asks is not None and self.epsilon is not None and asks.epsilon is not None and asks.epsilon > self.epsilon:
            raise LimitExceeded(
                f"this federation's plan has privacy.epsilon = {asks.epsilon:g}; this device allows {self.epsilon:g} "
                "(--max-epsilon)"
            )
        if asks is not None and asks.delta > (most := self.most_delta(samples)):
            raise LimitExceeded(
                f"this federation's plan has privacy.delta = {asks.delta:g}; this device allows {most:.3g} (--max-delta)"
            )


NO_DEMANDS = PrivacyLimits()


S = TypeVar("S", bound=msgspec.Struct)
# Errors that name what a plan or a setting asks for. Others may quote labels, tokens, cells or gaps of the data.
_NOT_OF_SAMPLES = (DiskFull, HomeMismatch, SettingError, WireError)


@dataclass(frozen=True)
class Gate:
    """Gate of one device.

    Attributes:
        options: The owner's options.
        plan: The plan that the device has accepted; None: there is none yet.
    """

    options: DeviceOptions
    plan: Plan | None = None

    @property
    def _with_noise(self) -> bool:
        """True if what depends on single samples leaves only with noise."""
        return self.options.privacy.needs_noise or (self.plan is not None and self.plan.is_private)

    @property
    def _sums(self) -> SecureSumSettings | None:
        return None if self.plan is None else secure_sum_in(self.plan.transforms)

    @property
    def tells_scores(self) -> bool:
        """True if the server is told losses, scores and the texts of errors."""
        metrics = self.options.privacy.metrics
        return metrics == "all" or (metrics is None and not self._with_noise)

    def _permits(self, mode: str, declared: bool = False) -> bool:
        disclose, scores, clear = self.options.disclose, self.tells_scores, "statistics" in self.options.disclose
        permissions: dict[str, bool] = {
            **dict.fromkeys(("sent", "noisy", "masked"), True),
            **dict.fromkeys(("scores", "by --metrics", "charged"), scores),
            **dict.fromkeys(("disclosed", "disclosed noisy"), clear),
            "disclosed unmasked": clear and "masked-statistics" not in disclose,
            "masked sum": clear or "masked-statistics" in disclose,
            "shares": clear and scores,
            "by units": self.options.units != "none",
            "declared": declared,
        }
        return permissions.get(mode, False)

    def allows(self, field: str, declared: bool = False) -> bool:
        """Return whether a field is sent; `declared`: its value is what the owner has declared."""
        row, (noise, secure) = rows().get(field), self._columns(field)
        modes = [] if row is None else [row.noise] * noise + [row.secure] * secure or [row.usual]
        return bool(modes) and all(self._permits(mode, declared) for mode in modes)

    def _columns(self, field: str) -> tuple[bool, bool]:
        """Return whether the columns `noise` and `secure` of the table decide about a field beside what is summed or has noise.

        Evaluations are as usual under secure aggregation, also where the server adds noise to sums.
        """
        of_order = field.startswith(("Metrics.", "Trouble."))
        by_server = not of_order and self.plan is not None and self.plan.noisy_sums is not None
        return self._with_noise or by_server, not of_order and self._sums is not None

    def objection(self, field: str, noisy: bool = False) -> str:
        """Return why a field with statistics is not sent; empty if it is. A server may ask although its plan has privacy."""
        row, (noise, secure) = rows()[field], self._columns(field)
        if not self._permits(row.usual):
            masks = "masked-statistics, or " if row.usual == "masked sum" else ""
            return f"it discloses no statistics (fedclient --disclose {masks}statistics)"
        if noise and not (noisy and row.noise == "disclosed noisy"):
            return (
                "its data leave only with noise (privacy.unit, --max-epsilon, --max-delta), and statistics have none: set "
                "privacy.statistics_epsilon"
            )
        if secure and row.secure == "not sent":
            return "its sums leave only masked (privacy.secure_aggregation), and statistics are not"
        return ""

    def profile(self, profile: Profile, declares: Collection[str]) -> Profile:
        """Return what the server is told of a shard, of which meta.json declares some facts."""
        labels, vocabulary = "classes" in declares or profile.task != "classes", "vocabulary" in declares
        declared = {"Profile.labels": labels, "Profile.vocabulary": vocabulary}
        return without(profile, refused(Profile, lambda field: self.allows(field, declared.get(field, False))))

    def report(self, result: OrderResult) -> OrderResult:
        """Return what the server is told of the result of an order.

        If it is not told how frequent the classes are, an evaluation says whether the device is better than a constant answer.
        """
        if self._sums is not None and result.trained:
            return report_of(result)
        if result.accuracy_constant is not None and "accuracy_constant" in self._untold:
            above = None if result.trained else int(not result.no_better_than_constant)
            result = msgspec.structs.replace(result, above_constant=above)
        sent = without(result, self._untold.values())
        if self.tells_scores:
            return sent
        paid = {field.partition(".")[2] for field, row in rows().items() if row.noise == "charged"}
        return msgspec.structs.replace(sent, **{name: value for name, value in result.noisy.items() if name in paid})

    @cached_property
    def _untold(self) -> dict[str, FieldInfo]:
        """Fields of a result that the server is not told, by name: the same for every order."""
        return {field.name: field for field in refused(Metrics, self.allows)}

    def reason(self, text: str) -> str:
        """Return what the server is told of why an order failed: the text may tell of samples."""
        return text if text == SPENT or self.allows("Trouble.reason") else "it cannot carry out the order; its own log says why"

    def declined(self, error: AttuneError) -> str:
        """Return what the server is told of why the device takes no part: not which labels, tokens or gaps its data have.

        A server could leave some of them out of a plan, to be told which ones occur and how often.
        """
        if isinstance(error, _NOT_OF_SAMPLES) or (self.tells_scores and not self.options.privacy.needs_noise):
            return str(error)
        return f"its data do not fit the plan ({error.kind}); its own log says why"

    def check_method(self, name: str, adds_up: bool) -> None:
        """Check the plan's method, which adds up over samples or not.

        Raises:
            LimitExceeded: It asks for sums over samples that neither the owner allows nor masks hide.
        """
        if adds_up and "sums" not in self.options.disclose and not (self._sums is not None and self._sums.exact):
            raise LimitExceeded(
                f"this federation's method {name} asks for sums over this device's samples, from which single samples can "
                "be computed; the owner of the data allows that by --disclose sums, or the operator masks them "
                "(privacy.secure_aggregation)"
            )

    def check_sums(self, order: Order) -> None:
        """Check that an order asks for sums over samples, or the finished network, only where the owner allows it.

        Sums may also be asked for where masks hide them among others.

        Raises:
            Forbidden: It asks for them all the same.
        """
        if self.plan is not None and self.plan.matrix and order.work == "train" and "model" not in self.options.disclose:
            raise Forbidden("the server asked for the network of this device; its owner shares none (--share-model)")
        enough = "sums" in self.options.disclose if self._sums is None else self._sums.devices >= FEWEST_DEVICES
        if SOLVED in order.returns and not enough:
            raise Forbidden("the server asked for sums over samples; this device's owner allows none (--disclose sums)")


def report_of(result: OrderResult) -> OrderResult:
    """Return what the server is told of an order whose update is summed with others: that it is done."""
    return OrderResult(order_id=result.order_id, round=result.round, trained=result.trained, samples=0)


_fields = cache(fields)  # to read the types of a struct takes a millisecond, and each device of a simulation asks


def refused(kind: type[msgspec.Struct], allows: Callable[[str], bool]) -> list[FieldInfo]:
    """Return those fields of a struct or a message that are not allowed."""
    return [field for field in _fields(kind) if not allows(f"{kind.__name__}.{field.name}")]


def without(value: S, hidden: Collection[FieldInfo]) -> S:
    """Return a struct or a message without the values of these fields, as if nothing was known of them."""
    empty = {field.name: type(getattr(value, field.name))() for field in hidden if field.default not in (None, msgspec.UNSET)}
    unknown = {field.name: field.default for field in hidden if field.name not in empty}
    return msgspec.structs.replace(value, **empty, **unknown)


def with_rows(message: Any) -> Any:
    """Return a message without the fields that have no row."""
    if isinstance(message, tuple):
        return tuple(map(with_rows, message))
    if not isinstance(message, msgspec.Struct):
        return message
    inner = {name: with_rows(value) for name, value in msgspec.structs.asdict(message).items()}
    return without(msgspec.structs.replace(message, **inner), refused(type(message), rows().__contains__))


def finished_network(plan: Plan, folder: Path | None) -> dict[str, Tensor]:
    """Return the network of the device's finished model, which is to be evaluated by other devices and beside theirs.

    Raises:
        NoModel: It has none, or one of another model than the plan's.
        SettingError: It has no network that predicts elsewhere, or one that may not leave it.
    """
    if folder is None:
        raise NoModel("a simulated device has no finished model in files")
    given, tensors = read_network(folder)
    given.check()
    if "privacy" in msgspec.json.decode(read_small(folder / "model.json", MOST_BYTES)):
        raise SettingError("this device's model comes from a run with noise or masks (privacy): it stays here")
    if (given.model, given.classes) != (plan.model, plan.classes):
        raise NoModel("this device's finished model is another one than those that are compared")
    return tensors
