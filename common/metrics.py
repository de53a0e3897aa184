"""The numbers that a device reports with the answer to an order: their types, and a descriptor of each.

A new metric is a field of `Metrics` with a descriptor in `METRICS`. The exports, the status, the dashboard, /metrics and the
pictures read the descriptors, so nothing else needs to change. The limits of a number are part of its type: an impossible value
is refused where the report is read. A gain is the difference of two scores: one beyond 2, which earlier devices report of a
model that diverged, is cut to 2. A number without a natural limit is at most LARGEST, so that views can add and square the
numbers of any fleet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from attune.common.errors import UpdateRefused
from attune.common.task import ScoredTask
from attune.common.text import clean, from_json

MAX_COUNT = 1 << 53  # exact in every reader of JSON and CSV, and well within SQLite's integers
LARGEST = 1e100  # magnitude of a reported number; its square is finite, and so is the sum of any number of devices
LARGEST_GAIN = 2.0  # the difference of two scores, each of which is from -1 to 1
LARGEST_KEPT = 1.7e308  # magnitude in homes of before LARGEST; `within_bounds` cuts it where such a row is read

# "alone" stands for all models that the device has fitted by scikit-learn on its own samples (fedclient.work.portfolio). A
# device of an earlier version may keep finished models, which were fine-tuned at the end.
Choice = Literal["personalized", "common", "local", "finished-personalized", "finished-common", "alone"]
CHOICES: tuple[Choice, ...] = ("personalized", "common", "local", "alone")  # whose likelihoods devices report, for the prior
NETWORKS: tuple[Choice, ...] = ("personalized", "common", "local", "finished-personalized", "finished-common")
Rival = Literal["common", "local", "alone"]
Finite = Annotated[float, msgspec.Meta(ge=-LARGEST_KEPT, le=LARGEST_KEPT)]
Score = Annotated[float, msgspec.Meta(ge=-1, le=1)]  # below 0 in regression alone: common.task
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST_KEPT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Yes = Annotated[int, msgspec.Meta(ge=0, le=1)]
_NAME, _LONGEST = re.compile(r"[a-z0-9][a-z0-9-]*"), 32
FALSE_RATES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # at which sensitivities are reported
Sensitivities = Annotated[tuple[Share, ...], msgspec.Meta(min_length=len(FALSE_RATES), max_length=len(FALSE_RATES))]
FittedName = Annotated[str, msgspec.Meta(pattern=f"^{_NAME.pattern}$", max_length=_LONGEST)]  # of a model that a device fits

MOST_OTHERS = 100  # devices whose network another one evaluates
Differing = Annotated[float, msgspec.Meta(ge=-LARGEST_GAIN, le=LARGEST_GAIN)]
OwnerName = Annotated[str, msgspec.Meta(max_length=64)]


class OtherScore(msgspec.Struct, frozen=True, omit_defaults=True):
    """Score of another device's network on a device's test part, and its paired comparison with the device's own network.

    Attributes:
        score: As accuracies are.
        better: Test samples on which it scores more than the own network; `worse`: on which it scores less.
        gain: Its mean score less the own one's, where scores are not 0 or 1, with its standard error and its p-value.
    """

    score: Score
    better: Count | None = None
    worse: Count | None = None
    gain: Differing | None = None
    error: Annotated[float, msgspec.Meta(ge=0, le=LARGEST)] | None = None
    p: Share | None = None


@dataclass(frozen=True)
class MetricDescriptor:
    """Descriptor of one metric: everything that the views need to know about it.

    Attributes:
        name: The field of `Metrics`, which is also the key on the wire and in the ledger, and the column of metrics.csv.
        title: A heading of a few words, without the unit.
        meaning: One line without a period, for the reference table and for /metrics.
        unit: Empty for text and for numbers without a unit.
        better: HIGHER or LOWER; None where neither direction is better.
        per: "device": a property of the device's model or data, whose latest value counts. "round": what one order cost the
            device, so that the values of several rounds are added up.
        combine: How the values of the devices of one round become one number.
        chart: The heading of the dashboard's chart that draws it by round; empty for none.
    """

    name: str
    title: str
    meaning: str
    unit: str = ""
    better: Literal["higher", "lower"] | None = None
    per: Literal["device", "round"] = "device"
    combine: Literal["mean", "sum", "largest"] = "mean"
    chart: str = ""

    @property
    def heading(self) -> str:
        """The title with the unit and the better direction, for a picture."""
        better = f"{self.better} is better" if self.better else ""
        more = ", ".join(words for words in (self.unit, better) if words)
        return f"{self.title} ({more})" if more else self.title

    def combined(self, values: Sequence[float]) -> float | None:
        """Return one number for all devices of a round; None if no device has one, except for sums, which are 0 then."""
        if self.combine == "sum":
            return sum(values)
        if not values:
            return None
        return max(values) if self.combine == "largest" else math.fsum(values) / len(values)


class Metrics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The numbers of one answer; None where the device has no such number. `METRICS` says what each of them means.

    Accuracies are fractions of the device's own test part, or the mean score of its samples in another task (common.task).

    Attributes:
        fitted: Weights among themselves of the models that the device fits alone, by its own samples. The server makes a prior
            for other devices of them. No view shows them.
        others: Scores of other devices' networks, by device.
        roc: Sensitivities of what is kept and of ordinary models alone, at the false positive rates FALSE_RATES of this device.
    """

    loss: Finite | None = None
    accuracy_before: Score | None = None
    accuracy_after: Score | None = None
    accuracy_common: Score | None = None
    accuracy_local: Score | None = None
    accuracy_alone: Score | None = None
    accuracy_constant: Score | None = None
    above_constant: Yes | None = None
    better_than_common: Count | None = None
    worse_than_common: Count | None = None
    better_than_local: Count | None = None
    worse_than_local: Count | None = None
    better_than_alone: Count | None = None
    worse_than_alone: Count | None = None
    gain_common: Finite | None = None
    error_common: Finite | None = None
    p_common: Share | None = None
    gain_local: Finite | None = None
    error_local: Finite | None = None
    p_local: Share | None = None
    gain_alone: Finite | None = None
    error_alone: Finite | None = None
    p_alone: Share | None = None
    accuracy_kept: Score | None = None
    kept_better_than_common: Count | None = None
    kept_worse_than_common: Count | None = None
    kept_better_than_local: Count | None = None
    kept_worse_than_local: Count | None = None
    kept_better_than_alone: Count | None = None
    kept_worse_than_alone: Count | None = None
    kept_gain_common: Finite | None = None
    kept_error_common: Finite | None = None
    kept_p_common: Share | None = None
    kept_gain_local: Finite | None = None
    kept_error_local: Finite | None = None
    kept_p_local: Share | None = None
    kept_gain_alone: Finite | None = None
    kept_error_alone: Finite | None = None
    kept_p_alone: Share | None = None
    ranked: Yes | None = None
    auroc_kept: Share | None = None
    auroc_low: Share | None = None
    auroc_high: Share | None = None
    auroc_alone: Share | None = None
    auroc_gain_alone: Score | None = None
    auroc_error_alone: Share | None = None
    auroc_p_alone: Share | None = None
    kept: Choice | None = None
    likelihood_personalized: Finite | None = None
    likelihood_common: Finite | None = None
    likelihood_local: Finite | None = None
    likelihood_alone: Finite | None = None
    likelihood_kept: Finite | None = None
    likelihood_closed_form: Finite | None = None
    likelihood_closed_form_error: Finite | None = None
    dial_mean: Share | None = None
    dial_own: Share | None = None
    test_samples: Count | None = None
    test_groups: Count | None = None
    epsilon: Amount | None = None
    seconds: Amount | None = None
    bytes_up: Count | None = None
    bytes_down: Count | None = None
    fitted: Annotated[dict[FittedName, Share], msgspec.Meta(max_length=32)] = {}
    roc: dict[Literal["kept", "alone"], Sensitivities] = {}
    others: Annotated[dict[OwnerName, OtherScore], msgspec.Meta(max_length=MOST_OTHERS)] = {}

    @property
    def likelihoods(self) -> dict[Choice, float]:
        """The log-likelihoods that were reported, by model."""
        values = {model: getattr(self, name) for model, name in LIKELIHOODS.items()}
        return {model: value for model, value in values.items() if value is not None}


_D = MetricDescriptor
HIGHER: Literal["higher"] = "higher"
LOWER: Literal["lower"] = "lower"
_TRAFFIC = "Bytes sent and fetched"
_RIVAL_MODELS: Mapping[Rival, str] = {
    "common": "the common model",
    "local": "the local model",
    "alone": "ordinary models alone",
}


def _against(prefix: str, model: str) -> Iterator[MetricDescriptor]:
    """Yield the descriptors of a model's comparisons with each rival."""
    for rival, name in _RIVAL_MODELS.items():
        for figure, what, won, lost, better in (
            ("better", "wins over", f"the {model} model", "it", HIGHER),
            ("worse", "losses to", "it", f"the {model} model", LOWER),
        ):
            title, meaning = f"{model} model's {what} {name}", f"Test samples on which {won} beats {lost}"
            yield _D(f"{prefix}{figure}_than_{rival}", title, meaning, "samples", better)
    for rival, name in _RIVAL_MODELS.items():
        gain = f"{prefix}gain_{rival}"
        yield _D(gain, f"{model} model's gain over {name}", "Mean score gain; only where scores are not 0 or 1", better=HIGHER)
        yield _D(f"{prefix}error_{rival}", "standard error of that gain", f"Standard error of `{gain}`")
        yield _D(f"{prefix}p_{rival}", "p-value of that gain", f"Uncorrected p-value of the paired test of `{gain}`")


_DESCRIPTORS = (
    _D("loss", "training loss", "Mean training loss of the last local epoch", better=LOWER, chart="Training loss"),
    _D("accuracy_before", "accuracy as served", "Accuracy of what was served, before local training", better=HIGHER),
    _D("accuracy_after", "accuracy after training", "Accuracy of the same model after local training", better=HIGHER),
    _D("accuracy_common", "accuracy of the common model", "Accuracy of the model served on a cold start", better=HIGHER),
    _D("accuracy_local", "accuracy of the local model", "Accuracy of a model trained on this device alone", better=HIGHER),
    _D("accuracy_alone", "accuracy alone", "Accuracy of the best ordinary model that the device can fit alone", better=HIGHER),
    _D("accuracy_constant", "accuracy of a constant answer", "Accuracy of the most frequent training label", better=HIGHER),
    _D("above_constant", "above a constant answer", "1 if the kept model scores more than a constant answer", better=HIGHER),
    *_against("", "own"),
    _D("accuracy_kept", "accuracy of the kept model", "Accuracy of what the device predicts with", better=HIGHER),
    *_against("kept_", "kept"),
    _D("ranked", "scored by AUROC", "1 if accuracies and gains are AUROCs and their differences (`train.score`)"),
    _D("auroc_kept", "AUROC of the kept model", "Area under its ROC curve; from 10 test cases of each class", better=HIGHER),
    _D("auroc_low", "lower end of it", "Lower end of the 95 % interval of `auroc_kept`; only of two classes"),
    _D("auroc_high", "upper end of it", "Upper end of that interval"),
    _D("auroc_alone", "AUROC alone", "The same of the best ordinary model that the device can fit alone", better=HIGHER),
    _D("auroc_gain_alone", "gain in AUROC over alone", "The difference of both; only of two classes", better=HIGHER),
    _D("auroc_error_alone", "standard error of that gain", "Standard error of `auroc_gain_alone`, by DeLong"),
    _D("auroc_p_alone", "p-value of that gain", "Uncorrected p-value of the paired test of `auroc_gain_alone`"),
    _D("kept", "kept model", "Model that the device predicts with, or that weighs most in its blend"),
    _D("likelihood_personalized", "likelihood, own model", "Summed log-likelihood of the held-out samples", "nats", HIGHER),
    _D("likelihood_common", "likelihood, common model", "Summed log-likelihood of the held-out samples", "nats", HIGHER),
    _D("likelihood_local", "likelihood, local model", "Summed log-likelihood of the held-out samples", "nats", HIGHER),
    _D("likelihood_alone", "likelihood, alone", "The same of the ordinary models that are fitted alone", "nats", HIGHER),
    _D("likelihood_kept", "likelihood, kept model", "The same, each sample under weights found without it", "nats", HIGHER),
    _D("likelihood_closed_form", "gain by the closed form", "What training samples gain by it, out of fold", "nats", HIGHER),
    _D("likelihood_closed_form_error", "standard error of it", "Standard error of that gain, over samples", "nats"),
    _D("dial_mean", "dial at the common value", "Share of the attended components at the common value"),
    _D("dial_own", "dial at the own value", "Share of the attended components at the value that the device trained alone"),
    _D("test_samples", "test samples", "Samples of the test part, the weights of averages over samples", "samples"),
    _D(
        "test_groups",
        "groups of test samples",
        "Independent groups of the test samples; only where samples have groups",
        "groups",
    ),
    _D("epsilon", "privacy spent", "Epsilon that was spent on the device's data, in all runs", combine="largest"),
    _D("seconds", "work", "Seconds of work on the device", "s", LOWER, "round", "largest", "Seconds of the slowest device"),
    _D("bytes_up", "sent", "Bytes that arrived from the device", "bytes", LOWER, "round", "sum", _TRAFFIC),
    _D("bytes_down", "fetched", "Bytes that the device fetched", "bytes", LOWER, "round", "sum", _TRAFFIC),
)
METRICS = {descriptor.name: descriptor for descriptor in _DESCRIPTORS}  # in the order of the columns of metrics.csv
ACCURACIES = tuple(name for name in METRICS if name.startswith("accuracy_"))
WIDE = tuple(field.name for field in msgspec.structs.fields(Metrics) if {Finite, Amount} & set(get_args(field.type)))
LIKELIHOODS: Mapping[Choice, str] = {model: f"likelihood_{model}" for model in CHOICES}


M = TypeVar("M", bound=Metrics)


def prior_shares(models: Collection[str]) -> dict[str, float]:
    """Return the share of each model before anything is known, by name; they sum to 1.

    Networks that were trained on the same samples are alike, so together they have the share of the fitted models.
    """
    others = len(models) - ("alone" in models)
    if others in (0, len(models)):
        return dict.fromkeys(models, 1 / len(models)) if models else {}
    return {name: 1 / 2 if name == "alone" else 1 / (2 * others) for name in models}


def is_model_name(name: str) -> bool:
    """Return whether a peer's text can be the name of one of a device's models."""
    return len(name) <= _LONGEST and _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class RivalMetrics:
    """Names of the metrics that compare a model of a device with one rival."""

    accuracy: str
    better: str
    worse: str
    gain: str
    error: str
    p: str


def _rivals(prefix: str) -> Mapping[Rival, RivalMetrics]:
    names = ("better_than", "worse_than", "gain", "error", "p")
    return {
        rival: RivalMetrics(f"accuracy_{rival}", *(f"{prefix}{name}_{rival}" for name in names)) for rival in get_args(Rival)
    }


RIVALS = _rivals("")  # of the device's own model
KEPT_RIVALS = _rivals("kept_")  # of what the device keeps, to predict with
OF_OTHERS = RivalMetrics("score", "better", "worse", "gain", "error", "p")  # names of OtherScore
OF_SCORES = {*ACCURACIES, *(name for of in (RIVALS, KEPT_RIVALS) for one in of.values() for name in astuple(one))}
_BOUNDS = dict.fromkeys(WIDE, LARGEST) | {
    names.gain: LARGEST_GAIN for rivals in (RIVALS, KEPT_RIVALS) for names in rivals.values()
}
# Each takes values of a struct at once: one call in place of one for each.
_ALL, _BOUNDED, _ACCURACIES_OF = attrgetter(*Metrics.__struct_fields__), attrgetter(*_BOUNDS), attrgetter(*ACCURACIES)


def reported_by(source: Metrics) -> dict[str, Any]:
    """Return the metrics that a struct has, by name and without those that are None."""
    return {name: value for name in METRICS if (value := getattr(source, name)) is not None}


def metrics_of(source: Metrics) -> Metrics:
    """Return the metrics alone of a struct that has further fields."""
    return Metrics(**dict(zip(Metrics.__struct_fields__, _ALL(source), strict=True)))


def _cut(source: Metrics) -> dict[str, float]:
    """Return the numbers beyond their bounds, each cut to its bound."""
    return {
        name: math.copysign(bound, value)
        for (name, bound), value in zip(_BOUNDS.items(), _BOUNDED(source), strict=True)
        if value is not None and (value > bound or value < -bound)
    }


def within_bounds(source: M) -> M:
    """Return the struct with each gain cut to LARGEST_GAIN, and each other number to LARGEST; itself if it needs no cut."""
    cut = _cut(source)
    return msgspec.structs.replace(source, **cut) if cut else source


def read_metrics(text: bytes, who: str, task: ScoredTask = "classes") -> Metrics:
    """Read a peer's report, with gains cut as by `within_bounds`.

    Raises:
        UpdateRefused: The report has an impossible value; the error names the metric.
    """
    try:
        metrics = from_json(text, Metrics)
    except msgspec.DecodeError as error:
        raise UpdateRefused(f"{who} reports metrics that cannot be: {clean(str(error))}") from None
    if task == "ranked" and not metrics.ranked:  # a device of an earlier version: its scores are shares of right answers
        metrics = msgspec.structs.replace(metrics, **dict.fromkeys(OF_SCORES))
    cut = _cut(metrics)
    for name in WIDE if cut else ():
        if (value := getattr(metrics, name)) is not None and abs(value) > LARGEST:
            raise UpdateRefused(f"{who} reports metrics that cannot be: {name} = {value:.3g}, above {LARGEST:g}")
    for name, value in zip(ACCURACIES, _ACCURACIES_OF(metrics), strict=True):
        if value is not None and value < 0 and task != "regression":
            raise UpdateRefused(f"{who} reports metrics that cannot be: {name} = {value}, which only R2 can be")
    return msgspec.structs.replace(metrics, **cut) if cut else metrics
