"""Profile of a shard, which a device declares, and plan of the run, which the server fixes for all devices at round 1."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec

from attune.common.config import TAG, PrivacySettings, TrainSettings
from attune.common.errors import SettingError
from attune.common.schema import Column, Schema
from attune.common.task import SCORED, ScoredTask, TaskName
from attune.common.text import clean, listed

Kind = Literal["images", "tokens", "series", "tabular"]
Label = int | str
POSITIONED: frozenset[Kind] = frozenset({"tokens", "images"})  # kinds of which every position can have a label
FEWEST_DEVICES = 5  # devices whose statistics are combined for others; with fewer, each of them must have agreed
RARE = 0.2  # share of the rarer of two classes, below which accuracy says little
FEWEST_ROWS = 10  # rows behind each number that statistics show, and behind what a proposal tells
MAIN = "main"  # the name of a plan's model among its variants for people; elsewhere it is empty
GREY, LUMA = "grey", {"red": 0.299, "green": 0.587, "blue": 0.114}  # of Rec. 601, by which image programs make images grey
USUAL = {1: [GREY], 3: [*LUMA], 4: [*LUMA, "alpha"]}  # names of an image's channels, by their number
LIGHT = "light"  # the variant of devices that take part with the closed form alone, since they have no torch
FIRST_RUN = "first"  # the name of a federation's first run for people; in the plan and the ledger it is empty


def run_name(run: str) -> str:
    """Return the name of a plan's `run` for people and for folders."""
    return run or FIRST_RUN


class Columns(msgspec.Struct, frozen=True):
    """Sums of each column over the rows of a shard's training part.

    A row is a sample; for the features of a series it is one step of a sample.
    """

    rows: int
    mean: list[float]  # (F,), (C,) or (K,)
    squares: list[float]  # sums of squared distances from the mean


class Scale(msgspec.Struct, frozen=True):
    """Mean and standard deviation of columns, over the devices that disclosed their sums before round 1, or over one device."""

    mean: list[float]  # (F,), (C,) or (K,)
    std: list[float]  # 1 for a column that never changes


class Profile(msgspec.Struct, frozen=True):
    """Description of a shard. Before training, nothing else about the data leaves the device.

    `columns` and `targets` leave it only with `fedclient --disclose statistics`.
    """

    kind: Kind
    shape: tuple[int, ...]  # of one sample: (H, W, C), (T,), (T, C) or (F,)
    labels: list[Label]  # distinct labels, sorted, or the `classes` of meta.json; in other tasks the names of the outputs
    samples: int  # training samples
    test_samples: int
    vocabulary: int = 0  # tokens only: largest token + 1, or as declared
    per_position: bool = False  # a label for every position of tokens, y (N, T), or of images, (N, H, W), not one a sample
    columns: Columns | None = None  # only if meta.json asks to standardise over the federation
    column_names: list[str] = []  # of features (tabular) or channels (series, images), in order; empty: not known
    task: TaskName = "classes"
    targets: Columns | None = None  # regression only: sums of the targets
    schema: Schema | msgspec.UnsetType = msgspec.UNSET  # of a table: by which the samples were made
    proposal: Schema | msgspec.UnsetType = msgspec.UNSET  # of a table: a schema, which the server merges with others
    rare: bool | msgspec.UnsetType = msgspec.UNSET  # True: of two classes one has less than RARE of the training samples
    variant: str | msgspec.UnsetType = msgspec.UNSET  # of the model, as the device's owner has chosen; unset: the plan's own
    tag: str | msgspec.UnsetType = msgspec.UNSET  # by which rounds may be limited; unset: the device gives itself none

    @property
    def labels_pixels(self) -> bool:
        """True if every pixel of an image has a label."""
        return self.per_position and self.kind == "images"


class DataSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Declarations of the operator about the data. What is not declared, the majority of the devices decides at round 1."""

    # Kind of data. none: the devices decide.
    kind: Kind | None = None
    # Shape of one sample: (H, W, C), (T), (T, C) or (F). Empty: the devices decide.
    shape: list[Annotated[int, msgspec.Meta(ge=1)]] = []
    # All labels that may occur on any device; in other tasks the names of the outputs. Empty: all labels that the devices of
    # round 1 declare.
    classes: list[Label] = []
    # Number of tokens. 0: the largest number that a device of round 1 declares.
    vocabulary: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Names of a table's features, or of channels, in order; a device with others is refused. Empty: as most devices. Or a
    # schema: sections [data.columns.NAME] (docs/tables.md).
    columns: list[str] | dict[str, Column] = []
    # Devices bring images of other sizes, series of other lengths and other channels to `data.shape` themselves
    # (docs/shards.md#other-sizes-and-channels).
    fit: bool = False
    # Task of all devices (docs/shards.md#other-tasks). A device with another one is refused. none: as more than half of the
    # devices.
    task: TaskName | None = None

    def __post_init__(self) -> None:
        if self.fit and (len(self.shape) not in (2, 3) or (self.names and len(self.names) != self.shape[-1])):
            raise SettingError(
                "setting data.fit needs data.shape: (H, W, C) of images or (T, C) of series; and data.columns, if set, has a "
                "name for each of the C channels"
            )

    @property
    def channels(self) -> list[str] | msgspec.UnsetType:
        """Names of the channels to which devices fit their samples; empty: not known. Unset: they fit none."""
        return channels_of(self.shape, self.names) if self.fit else msgspec.UNSET

    @property
    def names(self) -> list[str]:
        """Names of the features that are declared; empty if none are."""
        return self.columns if isinstance(self.columns, list) else []

    @property
    def schema(self) -> Schema | None:
        """The schema that is declared.

        Raises:
            SettingError: It is wrong.
        """
        return Schema.of(self.columns) if isinstance(self.columns, dict) and self.columns else None


class ModelSpec(msgspec.Struct, frozen=True):
    """Specification from which the architecture is built; saved beside every model as JSON."""

    name: str  # a registered name, or "package.module:factory"
    kind: Kind
    shape: tuple[int, ...]
    classes: int  # outputs for a sample, or for a position: a score for each class, or a number for each target or label
    vocabulary: int = 0
    options: dict[str, Any] = {}
    per_position: bool = False  # logits (N, T, classes) or (N, H, W, classes) instead of (N, classes)
    body_digest: str | msgspec.UnsetType = msgspec.UNSET  # of the frozen body, which never travels; unset without one
    embedded: dict[str, int] | msgspec.UnsetType = msgspec.UNSET  # features that are indices: place -> number of values
    feature_mean: bool | msgspec.UnsetType = msgspec.UNSET  # True: it has the buffers of common.models.feature_mean
    channels: list[str] | msgspec.UnsetType = msgspec.UNSET  # to which samples are fitted, and to `shape`; unset: they have it

    @property
    def positions(self) -> tuple[int, ...]:
        """The axes of a sample whose positions have a label each: (T,) of tokens, (H, W) of images; else none."""
        return self.shape[:2] if self.per_position else ()

    @property
    def labels_pixels(self) -> bool:
        """True if every pixel of an image has a label."""
        return self.per_position and self.kind == "images"


def channels_of(shape: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return the names of a sample's channels, for an image without names the usual ones of so many; empty: not known."""
    return list(names) or (USUAL.get(shape[-1], []) if len(shape) == 3 else [])


def channel_weights(form: ModelSpec | DataSettings, shape: Sequence[int], names: Sequence[str]) -> list[list[float]]:
    """Return the weight of each channel of a device's samples, (K,), in each of the channels to which they are fitted, (C,).

    Channels of one name are the same. Grey stands for missing colours, and the luma of the colours for missing grey. Any other
    missing channel has no weights.

    Args:
        form: The form to which samples are fitted.
        shape: Shape of a sample of the device.
        names: Names of its channels. If they are not as many, or none: the form's for as many, else the usual ones of images.

    Returns:
        (C, K); empty if samples of this shape cannot be fitted.
    """
    wanted, count = form.channels, shape[-1]
    if not isinstance(wanted, list) or len(shape) != len(form.shape):
        return []
    names = names if len(names) == count else ()
    if count == form.shape[-1] and not (names and wanted):
        return [[float(at == place) for at in range(count)] for place in range(count)]
    has = channels_of(shape, names)
    alike = {(name, name): 1.0 for name in has} | {(name, GREY): 1.0 for name in LUMA if name not in has}
    if GREY not in has and LUMA.keys() <= set(has):
        alike |= {(GREY, name): weight for name, weight in LUMA.items()}
    weights = [[alike.get((name, other), 0.0) for other in has] for name in wanted]
    return weights if any(map(any, weights)) else []


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """Settings of a run that are fixed at round 1. Every device receives the plan, and its bytes never change.

    A field that a later version adds is left out of the bytes where it is not used. `common.methods.registry.configured_in`
    gives the method with typed settings.
    """

    federation: str  # id of the federation (the CA's fingerprint)
    seed: int
    model: ModelSpec
    classes: list[Label]  # class index -> original label; names of K targets or labels
    method: str
    method_options: dict[str, Any]  # checked by common.methods
    train: TrainSettings
    scale: Scale | None = None  # None: each device standardises by its own statistics
    column_names: list[str] = []  # in the order in which every device must have them; empty: not known
    task: TaskName = "classes"
    targets: Scale | None = None  # regression only; None: each device by its own
    run: str = ""  # which of several runs over one enrolled fleet; empty: the first
    plugins: dict[str, str] = {}  # distribution -> version of each package whose code devices run
    transforms: dict[str, dict[str, Any]] = {}  # name -> settings, of each transform on updates beyond the usual ones
    device_transforms: list[str] = []  # those of them that devices run
    # What devices hand in of a part whose aggregator is a plug-in; of shared parts in buffered rounds, always "change".
    returns: dict[str, Literal["values", "change"]] = {}
    privacy: PrivacySettings | None = None  # None: all settings of [privacy] have their defaults
    expected_devices: int = 0  # client-level privacy: devices that a round draws on average, by which sums are divided
    schema: Schema | None = None  # of a table: by which every device makes its samples
    schema_digest: str = ""  # pins it: a device whose version reads it otherwise refuses
    closed_form: bool = False  # the closed form of all devices' sums is a member of each device's blend (round.analytic)
    no_closed_form: str = ""  # why it is not, in words for people; empty: it was not asked for, or it is
    score: Literal["", "auroc", "dice", "iou"] = ""  # what devices score classes by; empty: the task's own score
    rare: str = ""  # why it is this score, in words for people; empty: it was set
    portfolio: bool = False  # the server knows what devices report of models that they fit alone (Metrics.accuracy_alone)
    given: str = ""  # digest of a model that is evaluated without training, by `scale` at every site that has features in units
    matrix: bool = False  # in its place: networks that devices have from an earlier run, and hand in to be evaluated by all
    variants: dict[str, ModelSpec] = {}  # other sizes of the model, of which a device's owner may choose one

    def of_variant(self, name: str) -> Plan:
        """Return the plan as devices of a variant follow it, which has its model alone; empty: the plan's model.

        Raises:
            SettingError: The plan has no such variant.
        """
        check_variant(name, self.variants)
        model = self.variants[name] if name else self.model
        return msgspec.structs.replace(self, model=model, variants={}) if self.variants else self

    def group_of(self, variant: str | msgspec.UnsetType) -> str:
        """Return the variant whose networks are averaged with those of a device; of light devices one without networks.

        Where all devices have the closed form alone, a light one is like the others.
        """
        return "" if not variant or (variant == LIGHT and not self.closed_form) else variant

    @property
    def scored(self) -> ScoredTask:
        """The task with its score."""
        return "ranked" if self.score == "auroc" else self.score or self.task

    @property
    def is_private(self) -> bool:
        """True if devices train with noise."""
        return self.privacy is not None and self.privacy.on_devices

    @property
    def one_sum(self) -> bool:
        """Return whether devices hand in sums over samples behind masks, as one sum of many devices."""
        return self.privacy is not None and self.privacy.secure_aggregation

    @property
    def scaled_by_ranges(self) -> bool:
        """True if a closed form scales by the ranges of a table's schema, because there are no common statistics."""
        return self.scale is None and self.schema is not None and not self.schema.without_bounds

    @property
    def noisy_sums(self) -> PrivacySettings | None:
        """The settings with which the server adds noise to what devices share; None if it adds none."""
        return self.privacy if self.privacy is not None and self.privacy.on_server else None


def check_variant(name: str, known: Collection[str]) -> None:
    """Check the variant of a model that a device asks for; empty: the plan's model. A light device checks the plan by itself.

    Raises:
        SettingError: It is none of the known ones, which the error names.
    """
    if name not in ("", LIGHT, *known):
        has = f"it has {listed([*known, MAIN])}" if known else "its model has no variants (model.variant)"
        raise SettingError(f"this federation has no variant {clean(name, 40)!r} of its model: {has} (fedclient --variant)")


ONE_MEAN = (
    "masked sums (privacy.secure_aggregation) give of a score its mean by samples alone: AUROCs with their intervals and tests "
    "come from evaluations, which leave each site unmasked (fedclient --metrics none sends none), and no ROC curves are sent"
)


def check_tag(tag: str) -> str:
    """Return a tag of a device, if it is one; empty: it has none.

    Raises:
        SettingError: It is none.
    """
    if tag and not re.fullmatch(TAG, tag):
        raise SettingError(
            f"{clean(tag, 40)!r} is no tag: letters, digits, `.`, `_` and `-`, at most 32, a letter or digit first"
        )
    return tag


def standardisation(plan: Plan) -> str:
    """Return in one line by what features and targets are standardised, and why; empty for other data."""
    scales: dict[str, Scale | None] = {"features": plan.scale} if plan.model.kind in ("series", "tabular") else {}
    if plan.task == "regression":
        scales["targets"] = plan.targets
    by_way: dict[str, list[str]] = {}
    for what, scale in scales.items():
        by_way.setdefault(_way(plan, what, scale), []).append(what)
    return "; ".join(f"{' and '.join(what)} {way.format(' and '.join(what))}" for way, what in by_way.items())


def fitting_words(spec: ModelSpec, shape: Sequence[int], names: Sequence[str]) -> str:
    """Return in one line how samples with channels of these names are fitted to a model's; empty: they have its form."""
    weights, (*here, count), (*sizes, _) = channel_weights(spec, shape, names), shape, spec.shape
    if not weights:
        return ""
    words, is_image = [], len(sizes) > 1
    if here != sizes:
        was, size = (" x ".join(map(str, of)) for of in (here, sizes))
        how = (
            f"resized to {size}" if is_image else f"cut to the last {size}" if here > sizes else f"filled up in front to {size}"
        )
        words.append(f"{spec.kind} of {was}{'' if is_image else ' steps'} are {how}")
    has, wanted = channels_of(shape, names), [clean(name, 40) for name in spec.channels or []]
    if lacking := [name for name, row in zip(wanted, weights, strict=False) if not any(row)]:
        words.append(f"channels missing here, which stay {'0' if is_image else 'at the mean'}: {listed(lacking)}")
    if unknown := [name for name, row in zip(has, zip(*weights, strict=True), strict=False) if not any(row)]:
        words.append(f"channels that the plan does not know, and are left out: {listed(unknown)}")
    if count != spec.shape[-1] and GREY in {*has, *wanted} and not unknown and not lacking:
        words.append(f"{' and '.join(has)} {'stands' if count == 1 else 'stand'} for {' and '.join(wanted)}")
    return "; ".join(words)


def closed_form_words(plan: Plan) -> str:
    """Return in one line whether devices have the closed form; empty: it was not asked for."""
    if plan.no_closed_form:
        return f"no closed form joins the devices' blends: {plan.no_closed_form}"
    joins = "the closed form of the devices' sums joins every device's blend"
    if plan.closed_form and plan.one_sum:
        return f"{joins}: of one sum behind masks, which round 1 brings; later devices and new data are not in it"
    return joins if plan.closed_form else ""


def score_words(plan: Plan) -> str:
    """Return in one line by what models are scored, and why; empty: by the task's own score."""
    masked = f"; {ONE_MEAN}" if plan.one_sum and plan.scored == "ranked" else ""
    why = plan.rare or "train.score says so"
    return f"models are scored by {SCORED[plan.scored].metric}: {why}{masked}" if plan.score else ""


def _way(plan: Plan, what: str, scale: Scale | None) -> str:
    """Return by what one kind of numbers is standardised; {} stands for all kinds of which this is true."""
    privacy, features = plan.privacy or PrivacySettings(), what == "features"
    by_ranges = plan.is_private or (plan.scaled_by_ranges and plan.model.name == "closed-form")
    if features and by_ranges and plan.schema is not None:
        return "are standardised by the public ranges of the schema"
    if privacy.unit != "none":
        if not (privacy.ranges if features else privacy.target_ranges):
            if not features:
                return "stay in their own unit: privacy.target_ranges is not set"
            if plan.is_private:
                return "have no public ranges (privacy.ranges): a device that standardises them by its own numbers is refused"
            return "are standardised by each device's own statistics: with privacy.unit none are disclosed (privacy.ranges)"
        return f"are standardised by public ranges (privacy.{'ranges' if features else 'target_ranges'})"
    masked = "masked-" if privacy.secure_aggregation else ""
    if scale is not None:
        sums = " in a masked sum" if masked else ""
        return f"are standardised over the federation, by what devices disclosed{sums} before round 1"
    return (
        f"are standardised by each device's own statistics: neither {FEWEST_DEVICES} devices nor all of them disclosed those "
        f"of their {{}} before round 1 (fedclient --disclose {masked}statistics)"
    )
