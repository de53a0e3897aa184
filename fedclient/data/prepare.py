"""Preparation of a shard: the tensors that the model takes, by the plan that the federation has fixed.

N samples, H height, W width, C channels, T steps, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.errors import NonFiniteFeatures, ShapeMismatch, ShardError
from attune.common.methods.registry import configured_on_device
from attune.common.plan import Kind, Label, ModelSpec, Plan, Scale
from attune.common.schema import Schema, difference, remedy
from attune.common.seeds import derive
from attune.common.task import TaskName, asked
from attune.common.text import listed
from attune.fedclient.data import kinds, labels
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.holdout import hold_out, strata
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import group_weights
from attune.fedclient.data.standardiser import UNSEEN, Standardiser
from attune.fedclient.data.table_encoder import Rescaling, TableEncoder, given_scaling, to_ranges, unscaled
from attune.fedclient.light_blobs import as_tensor

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class HeldOut:
    """Samples that are held out of training: x and y as the model takes them, and weights as Prepared.validation_weight."""

    x: Tensor
    y: Tensor
    weight: Tensor | None


@dataclass(frozen=True)
class Prepared:
    """A shard's tensors as the model takes them; arrays without torch. The samples for validation are not trained on.

    Attributes:
        train_x: Images (N, C, H, W), series (N, T, C) or tabular (N, F) in float32, or tokens (N, T) in int64.
        train_y: Indices in the plan's classes, int64: (N,), or (N, T) or (N, H, W) if every position has a label. In other
            tasks (N, K) float32.
        test_x: Same as `train_x`.
        test_y: Same as `train_y`.
        validation_x: Same as `train_x`, with V samples.
        validation_y: Same as `train_y`.
        standardiser: Scaling of the features, or None if they stay as they are.
        test_groups: Group of each test sample, (N,). Samples of one group are not independent.
        targets: Scale of the numbers to predict; None in other tasks.
        validation_weight: Weight of each validation sample, (V,) float64: a group counts as one. None: every sample does.
        train_groups: Number of each training sample's group, (N,) int64, from 0. None without groups.
        validation_groups: Group of each validation sample, (V,), numbered from 0. None without groups.
        dial: The samples by which the dial is set, if they are others than those for validation.
        places: Places in the shard of all samples but those for testing: first those to train on, then those for validation,
            then those of the dial.
        groups: Groups of the same samples, in the order of the shard; None without groups.
        in_common: Whether the closed form has one scale on all devices, so that sums over their samples mean something.
        to_ranges: Factor and shift, (F,) each, from features to that scale, by the schema's ranges; None: they have it.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    validation_x: Tensor
    validation_y: Tensor
    standardiser: Standardiser | None
    test_groups: npt.NDArray[np.intp] | None = None
    validation_weight: Tensor | None = None
    targets: Scale | None = None
    train_groups: Tensor | None = None
    validation_groups: npt.NDArray[np.intp] | None = None
    dial: HeldOut | None = None
    places: npt.NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    groups: npt.NDArray[np.intp] | None = None
    in_common: bool = True
    to_ranges: Rescaling | None = None

    @property
    def dial_samples(self) -> HeldOut:
        """The samples by which a dial is set."""
        return self.dial or HeldOut(self.validation_x, self.validation_y, self.validation_weight)


def prepare(shard: Shard, plan: Plan) -> Prepared:
    """Return the shard's tensors for the plan's model.

    Raises:
        ShapeMismatch: Kind, shape, columns or task of the shard are not those of the plan, one has labels for positions and
            the other has labels for samples, or tokens are outside the vocabulary.
        UndeclaredLabels: A label is not in the plan's classes.
        NonFiniteFeatures: Values are too large for float32.
        ShardError: Training is private, and the shard is scaled or filled by its own statistics.
    """
    spec = plan.model
    if shard.kind != spec.kind:
        raise ShapeMismatch(
            f"shard {shard.name} holds {kinds.described(shard.kind, shard.train_x.shape[1:])}, but the federation is about "
            f"{kinds.described(spec.kind, spec.shape)}; point --data at a shard of that kind"
        )
    check_labelled_alike(shard, spec, plan.task, plan.classes)
    _check_schema(shard, plan)
    if plan.is_private and shard.schema is not None:
        shard = _filled_by_schema(shard, shard.schema)
    check_columns(shard, () if spec.channels else plan.column_names)
    targets = (plan.targets or _own_scale(shard, plan)) if plan.task == "regression" else None
    y_train, y_test = y_of(shard, spec, plan.task, plan.classes, targets)
    # With privacy, the label of one sample must not decide which others are trained on.
    layers = np.zeros(len(y_train), np.int64) if plan.is_private else strata(y_train, plan.task)
    fitted, held = hold_out(layers, plan.train.validation, derive(plan.seed, "validation"), shard.kind, shard.groups)
    fitted, dialled = _held_out_for_dial(shard, plan, layers, fitted)
    standardiser = _standardiser(shard, plan, fitted)
    names, who = shard.column_names, f"shard {shard.name}"
    x = [prepare_features(part, spec, standardiser, who, names) for part in (shard.train_x, shard.test_x)]
    y = [as_tensor(part) for part in (y_train, y_test)]
    groups = None if shard.test_groups is None else np.unique(shard.test_groups, return_inverse=True)[1]
    numbers = None if shard.groups is None else as_tensor(np.unique(shard.groups[fitted], return_inverse=True)[1])
    held_groups = None if shard.groups is None else np.unique(shard.groups[held], return_inverse=True)[1]
    dial = None if dialled is None else HeldOut(x[0][dialled], y[0][dialled], _weights(shard, dialled))
    places = np.concatenate([fitted, held, *([] if dialled is None else [dialled])])
    all_groups = None if shard.groups is None else np.unique(shard.groups, return_inverse=True)[1]
    return Prepared(
        x[0][fitted], y[0][fitted], x[1], y[1], x[0][held], y[0][held], standardiser, groups, _weights(shard, held), targets,
        numbers, held_groups, dial, places, all_groups,
        shard.kind == "images" or plan.scaled_by_ranges or (shard.over_the_federation and plan.scale is not None),
        to_ranges(shard.schema, plan, standardiser),
    )  # fmt: skip


def _check_schema(shard: Shard, plan: Plan) -> None:
    """Check that the shard's table was read by the plan's schema.

    Raises:
        ShapeMismatch: It was not, or this version reads the plan's schema otherwise than the server's.
    """
    if plan.schema is not None and plan.schema.digest != plan.schema_digest:
        raise ShapeMismatch("the plan's schema has another digest here than on the server: update the older of the two")
    planned, read = (None if schema is None else schema.digest for schema in (plan.schema, shard.schema))
    if planned != read:
        known = "has no schema of tables" if planned is None else f"has the schema {planned[:15]} (by its digest)"
        here = "read without one" if read is None else f"read by {read[:15]}"
        raise ShapeMismatch(f"the federation {known}, and shard {shard.name} is {here}: use the federation's, or --schema auto")


def _filled_by_schema(shard: Shard, schema: Schema) -> Shard:
    """Return the shard with the middle of a column's range in place of a missing value, not the device's own median.

    Raises:
        ShardError: The schema has no range for a number or a date.
    """
    if lacking := schema.without_bounds:
        raise ShardError(
            f"the schema of shard {shard.name} has no range for the columns {listed(lacking)}, and their own statistics would "
            "tell of its samples: this federation trains with privacy.unit. Let its operator set `range` in [data.columns]"
        )
    if shard.train_gaps is None or shard.test_gaps is None:
        return shard
    neutral_F = TableEncoder(schema).neutral
    parts = ((shard.train_x, shard.train_gaps), (shard.test_x, shard.test_gaps))
    train_x, test_x = (np.where(gaps, neutral_F, x).astype(x.dtype) for x, gaps in parts)
    return replace(shard, train_x=train_x, test_x=test_x, fill=neutral_F)


def _held_out_for_dial(
    shard: Shard, plan: Plan, layers: Array, fitted: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp] | None]:
    """Return the indices to train on, and those by which the dial is set; None: by the samples for validation.

    A dial makes the model out of the samples by which it is set. So where devices score what they would keep, these are
    others than those that score it.
    """
    if not plan.train.scored_rounds or not plan.method_options.get("dial"):
        return fitted, None
    groups = None if shard.groups is None else shard.groups[fitted]
    seed = derive(plan.seed, "dial")
    rest, held = hold_out(layers[fitted], plan.train.validation, seed, shard.kind, groups)
    return fitted[rest], fitted[held]


def _weights(shard: Shard, held: npt.NDArray[np.intp]) -> Tensor | None:
    """Return weights of samples, (V,), such that every group counts as one sample; None without groups."""
    return None if shard.groups is None else as_tensor(group_weights(shard.groups[held]))


def _standardiser(shard: Shard, plan: Plan, fitted: Array) -> Standardiser | None:
    """Return the scaling by the samples that are trained on, or by the plan's scale if the shard asks for that.

    Raises:
        ShardError: The plan's training is private, and the scaling would tell of this device's samples.
    """
    if (scaling := given_scaling(shard.schema, plan)) is not None:
        return replace(scaling, fill=shard.fill, missing_words=shard.missing_words)  # missing values are those of this site
    if plan.is_private and shard.schema is not None:
        mean_F, std_F = TableEncoder(shard.schema).public_scale
        if not shard.standardise:
            mean_F, std_F = np.zeros_like(mean_F), np.ones_like(std_F)
        return Standardiser(mean_F, std_F, shard.fill, shard.missing_words)
    if plan.is_private and shard.fill is not None:
        raise ShardError(
            f"shard {shard.name} fills missing values with its own medians, which would tell of its samples: this federation "
            "trains with privacy.unit. Leave out missing = median, and fill them with a constant"
        )
    if not shard.standardise or shard.kind not in ("series", "tabular"):
        if shard.fill is None and not shard.missing_words:
            return None
        zeros = np.zeros(plan.model.shape[-1])
        return Standardiser(zeros, zeros + 1, shard.fill, shard.missing_words)
    if plan.is_private:
        if plan.scale is None:
            raise ShardError(
                f"shard {shard.name} is standardised by its own statistics, which would tell of its samples: this federation "
                'trains with privacy.unit. Let its operator set privacy.ranges, or set "standardise": false in meta.json'
            )
        return Standardiser(np.array(plan.scale.mean), np.array(plan.scale.std), None, shard.missing_words)
    if shard.schema is not None and plan.scaled_by_ranges and configured_on_device(plan).objective.adds_up:
        return Standardiser(*TableEncoder(shard.schema).public_scale, shard.fill, shard.missing_words)
    if not shard.over_the_federation or plan.scale is None:
        _check_own_scale(shard, plan, "features")
        x = kinds.fit(shard.train_x[fitted], plan.model, shard.column_names)
        scaling = _blind(shard, fitted, unscaled(shard.schema, Standardiser.fit(x)))
        return replace(scaling, fill=shard.fill, missing_words=shard.missing_words)
    scaling = unscaled(shard.schema, Standardiser(np.array(plan.scale.mean), np.array(plan.scale.std)))
    return replace(scaling, fill=shard.fill, missing_words=shard.missing_words)


def _blind(shard: Shard, fitted: Array, scaling: Standardiser) -> Standardiser:
    """Return a scaling under which a feature stays what it is in training, if no training sample has a value in its column.

    Nothing is known of its scale, and new samples may have the column.
    """
    if shard.schema is None or shard.train_gaps is None:
        return scaling
    features = shard.schema.features()
    gap_F = np.asarray(shard.train_gaps[fitted].all(axis=0))
    unseen = {feature.column for feature, gap in zip(features, gap_F, strict=True) if gap}
    number_F, missing_F = (
        np.array([feature.role == role and feature.column in unseen for feature in features]) for role in ("number", "missing")
    )
    mean_F, std_F = np.where(missing_F, -UNSEEN, scaling.mean), np.where(number_F | missing_F, UNSEEN, scaling.std)
    return replace(scaling, mean=mean_F, std=std_F)  # 0 for the number, and 1 for the mark that it is missing


def _own_scale(shard: Shard, plan: Plan) -> Scale:
    if plan.is_private:
        raise ShardError(
            f"the numbers to predict of shard {shard.name} would be scaled by their own statistics, which tell of its samples: "
            "the server must be updated, since its plan has no scale for them"
        )
    _check_own_scale(shard, plan, "targets")
    fitted = Standardiser.fit(shard.train_y)
    return Scale(fitted.mean.tolist(), fitted.std.tolist())


def _check_own_scale(shard: Shard, plan: Plan, what: str) -> None:
    """Refuse (ShardError) a method that adds up numbers of all devices, where this device scales them by itself."""
    if configured_on_device(plan).objective.adds_up:
        raise ShardError(
            f"the {what} of shard {shard.name} would be scaled by its own statistics, but method {plan.method} adds up numbers "
            "of all devices. Start all with --standardise federation --disclose statistics; or scale the data yourself, with "
            "--standardise none"
        )


def check_columns(shard: Shard, expected: Sequence[str]) -> None:
    """Check that the shard's columns have the expected names in the expected order.

    Raises:
        ShapeMismatch: They have not. The check passes if the shard or the federation knows no names.
    """
    if unlike := difference(shard.column_names, expected):
        raise ShapeMismatch(f"shard {shard.name} {unlike}; {remedy(expected)}")


def y_of(shard: Shard, spec: ModelSpec, task: TaskName, classes: Sequence[Label], scale: Scale | None) -> tuple[Array, Array]:
    """Return y of the training part and of the test part as models take it.

    With classes these are int64 indices in `classes`, of pixels at the model's size; in other tasks float32, (N, K). Numbers to
    predict are standardised by `scale`, a mean and standard deviation.

    Raises:
        UndeclaredLabels: A label is not in `classes`.
    """
    if task == "classes":
        parts = [(shard.train_y, "training"), (shard.test_y, "test")]
        train, test = (labels.to_indices(y, classes, f"the {part} part of shard {shard.name}") for y, part in parts)
        if spec.labels_pixels and spec.channels is not msgspec.UNSET:
            return kinds.nearest(train, spec.shape[:2]), kinds.nearest(test, spec.shape[:2])
        return train, test
    numbers = [shard.train_y, shard.test_y]
    if scale is not None:
        numbers = [Standardiser(np.array(scale.mean), np.array(scale.std)).apply(y) for y in numbers]
    return numbers[0].astype(np.float32), numbers[1].astype(np.float32)


def check_labelled_alike(shard: Shard, spec: ModelSpec, task: TaskName, classes: Sequence[Label]) -> None:
    """Check that the shard has labels for the model's task, and for samples or positions as the model has.

    Raises:
        ShapeMismatch: The shard is for another task, or for other targets or labels. Or one side has a label for every
            position, and the other has one for every sample.
    """
    if shard.task != task or (task != "classes" and shard.labels != list(classes)):
        raise ShapeMismatch(
            f"shard {shard.name} is for {asked(shard.task, shard.labels)}, but the model is for {asked(task, classes)}; "
            "set `task` (and `classes`, the names of what y holds) in its meta.json, or point --data at another shard"
        )
    if shard.per_position != spec.per_position:
        has, needs = ("every position", "every sample") if shard.per_position else ("every sample", "every position")
        raise ShapeMismatch(
            f"shard {shard.name} has a label for {has}, but the model gives one for {needs}; for every sample y has "
            "shape (N,), for every position the shape of x, (N, T), of images without channels, (N, H, W)"
        )


def prepare_features(
    x: Array, spec: ModelSpec, standardiser: Standardiser | None, who: str = "the given data", names: Sequence[str] = ()
) -> Tensor:
    """Return samples as the model takes them.

    These are images (N, C, H, W), series (N, T, C) or tabular (N, F) in float32, or tokens (N, T) in int64. Images of
    8 bits are divided by 255.

    Args:
        x: Samples as in an .npz file.
        spec: The model's kind, shape and vocabulary.
        standardiser: Scaling of series and tables, if any.
        who: Name of the data in messages.
        names: Names of the channels of x, if they are known.

    Raises:
        ShapeMismatch: The samples have another shape than the model takes, and are not fitted to it; or tokens are outside its
            vocabulary.
        NonFiniteFeatures: Values are NaN or infinite, or too large for float32.
        ShardError: Tokens are negative.
    """
    where = f"x of {who}"
    given = kinds.with_axes(x, spec, who, names)
    x = kinds.fit(given, spec, names)
    if is_fitted := x is not given:
        _check_finite(given, spec.kind, where)
    if tuple(x.shape[1:]) != tuple(spec.shape):
        raise ShapeMismatch(
            f"{who} holds {kinds.described(spec.kind, x.shape[1:])}, but the model takes "
            f"{kinds.described(spec.kind, spec.shape)}; bring the samples to that shape"
        )
    if standardiser is not None:
        x = standardiser.filled(x)
    if not is_fitted:
        _check_finite(x, spec.kind, where)
    if spec.kind == "tokens":
        return _tokens(x, spec, who)
    numbers = kinds.as_fractions(x) if spec.kind == "images" else x
    numbers = standardiser.apply(numbers) if standardiser else numbers
    values = _float32(np.nan_to_num(numbers, nan=0.0) if is_fitted else numbers, spec.kind, where)
    if spec.kind == "images":
        values = np.ascontiguousarray(values.transpose(0, 3, 1, 2))
    return as_tensor(values)


def _check_finite(x: Array, kind: Kind, where: str) -> None:
    try:
        kinds.check_finite(x, kind, where)
    except NonFiniteFeatures as error:
        gappy = kind == "tabular" and np.isnan(x).any()
        hint = ". The model has no values for missing ones: devices that train with --missing median have" if gappy else ""
        raise NonFiniteFeatures(f"{error}{hint}") from None


def _tokens(x: Array, spec: ModelSpec, who: str) -> Tensor:
    if x.size and int(x.max()) >= spec.vocabulary:
        raise ShapeMismatch(
            f"{who} holds {int((x >= spec.vocabulary).sum())} tokens outside the federation's vocabulary of {spec.vocabulary}, "
            f"the largest is {int(x.max())}; declare `vocabulary` in meta.json of every device before the first round"
        )
    kinds.check_tokens(x, spec.vocabulary, f"x of {who}")
    return as_tensor(np.ascontiguousarray(x, dtype=np.int64))


def _float32(x: Array, kind: Kind, where: str) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        values = np.array(x, dtype=np.float32, order="C")
    try:
        kinds.check_finite(values, kind, f"{where}, scaled for the model,")
    except NonFiniteFeatures as error:
        raise NonFiniteFeatures(f"{error} (they are too large for 32-bit floats)") from None
    return values
