"""Form of the federation's data, as the operator declares it or the majority of the devices decides.

A profile comes from a device, which may be hostile. So its numbers are bounded, one device alone decides nothing, and errors
that quote a profile are short.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import msgspec

from attune.common.classes import look
from attune.common.errors import AttuneError, SettingError, ShapeMismatch, UndeclaredLabels
from attune.common.metrics import MAX_COUNT
from attune.common.models.registry import MAX_SAMPLE_VALUES, MAX_VOCABULARY
from attune.common.plan import POSITIONED, Columns, DataSettings, Label, ModelSpec, Plan, Profile, channel_weights
from attune.common.schema import LONGEST_NAME, Schema, difference, remedy, wrong_with
from attune.common.task import TASKS, TIME_AND_EVENT, TaskName, asked
from attune.common.text import listed
from attune.fedserver.core.scale import check_declared_sums
from attune.fedserver.core.table_schemas import OPTION, in_schema, without_schema
from attune.fedserver.core.voices import majority, usual_and_most, votes_of

MAX_LABELS = 1 << 16
LONGEST_LABEL = 256  # characters
MAX_LABELS_BYTES = 1 << 20  # of all labels of a device together
NAMED = 3  # labels and forms that an error names
AS_GIVEN = DataSettings()
# kind, shape of a sample, a label for every position, task, in tasks other than classes the names of what y holds, and the
# digest of a table's schema
Form = tuple[str, tuple[int, ...], bool, TaskName, tuple[Label, ...], str]


class Agreement(msgspec.Struct, frozen=True):
    """Outcome of the majority's decision.

    Attributes:
        agreed: Profiles of the majority's form.
        odd: The other devices, each with its error.
        tie: Why nothing can be decided; empty if it is.
    """

    agreed: dict[str, Profile] = {}
    odd: dict[str, AttuneError] = {}
    tie: str = ""


def agree(profiles: Mapping[str, Profile], tokens: Mapping[str, str] | None = None, form: DataSettings = AS_GIVEN) -> Agreement:
    """Find the form of data (kind, shape, task, labels by sample or by position) that more than half of the votes are for.

    The profiles that agree are those of the samples as devices fit them, if the operator lets them (`data.fit`).

    Args:
        profiles: Profile of each device.
        tokens: The join token of each device. Devices of one token share one vote: its holder can enrol any number of names.
        form: What the operator declares.
    """
    votes, profiles = votes_of(profiles, tokens or {}), {name: fitted(of, form) for name, of in profiles.items()}
    groups: dict[Form, list[str]] = defaultdict(list)
    for name in sorted(profiles):
        groups[form_of(profiles[name])].append(name)
    if not groups:
        return Agreement()
    largest = majority({name: form_of(profiles[name]) for name in sorted(profiles)}, votes)
    if largest is None:
        forms = "; ".join(f"{_words(form)}: {len(names)} devices" for form, names in list(groups.items())[:NAMED])
        columns = _unlike_columns({name: profiles[name] for name in sorted(profiles) if profiles[name].column_names})
        return Agreement(
            tie=f"no majority of the devices has data of one form ({forms}){f': {columns}' if columns else ''}. Devices that "
            "joined with one token have one vote. One device more can decide it, or the operator: revoke those that are wrong, "
            "or start a federation that declares data.kind and data.shape (and data.fit, which fits images and series to it)"
        )
    agreed = {name: profiles[name] for name in groups[largest]}
    reference = next((profile for profile in agreed.values() if profile.column_names), profiles[groups[largest][0]])
    odd: dict[str, AttuneError] = {
        name: _unlike(profiles[name], reference, name) for name in sorted(profiles) if name not in agreed
    }
    named = {name: profile for name, profile in agreed.items() if profile.column_names}
    usual = majority({name: tuple(profile.column_names) for name, profile in named.items()}, votes)
    if named and usual is None:
        return Agreement(
            tie="no majority of the devices that name their columns has the same ones in the same order: "
            f"{_unlike_columns(named)}. One device more can decide it, or the operator: start a federation that declares "
            "data.columns"
        )
    for name, profile in named.items():
        if unlike := difference(profile.column_names, usual or ()):
            odd[name] = ShapeMismatch(_other_columns(name, unlike, usual or ()))
    return Agreement({name: profile for name, profile in agreed.items() if name not in odd}, odd)


def one_token(tokens: Mapping[str, str]) -> str:
    """Warn that more than two devices joined with one token and no other did, so that votes by token protect nothing.

    Args:
        tokens: The join token of each device.
    """
    if len(tokens) <= 2 or len(set(tokens.values())) > 1 or not all(tokens.values()):
        return ""
    return (
        f"all {len(tokens)} devices joined with one token, so each of them votes on the form of the data, and its holder can "
        "enrol a majority: give every organisation a token of its own (`fedserver token`) if you do not know all devices"
    )


def columns_of(profiles: Mapping[str, Profile]) -> list[str]:
    """Return the column names that more than half of the devices have; none without such a majority."""
    votes = dict.fromkeys(profiles, Fraction(1))
    return list(majority({name: tuple(profile.column_names) for name, profile in profiles.items()}, votes) or ())


def too_many_classes(profiles: Mapping[str, Profile], tokens: Mapping[str, str]) -> dict[str, AttuneError]:
    """Return an error for each device that declares more classes than `usual_and_most` allows."""
    counts = {name: len(profile.labels) for name, profile in profiles.items() if profile.task == "classes"}
    remedy = "declare data.classes in a new federation"
    return {name: UndeclaredLabels(text) for name, text in _beyond(counts, tokens, "declares {} classes", remedy).items()}


def too_many_tokens(profiles: Mapping[str, Profile], tokens: Mapping[str, str]) -> dict[str, AttuneError]:
    """Return an error for each device that declares more different tokens than `usual_and_most` allows.

    A model has a vector for each token, and devices that tell of none say nothing about the usual number.
    """
    counts = {name: profile.vocabulary for name, profile in profiles.items() if profile.kind == "tokens" and profile.vocabulary}
    remedy = "declare data.vocabulary in a new federation"
    return {name: ShapeMismatch(text) for name, text in _beyond(counts, tokens, "declares {} tokens", remedy).items()}


def too_many_features(profiles: Mapping[str, Profile], tokens: Mapping[str, str]) -> dict[str, AttuneError]:
    """Return an error for each device that proposes more features, columns, values or text than `usual_and_most` allows.

    All proposals are united, so one such device would make the model of all many times as large, or the schema too large.
    """
    proposals = {name: profile.proposal for name, profile in profiles.items() if isinstance(profile.proposal, Schema)}
    counts = {name: _size_of(proposal) for name, proposal in proposals.items()}
    what, remedy = f"proposes {{}} columns, values or texts of {LONGEST_NAME} bytes", "describe the columns (data.columns)"
    return {name: ShapeMismatch(text) for name, text in _beyond(counts, tokens, what, remedy).items()}


def _beyond(counts: Mapping[str, int], tokens: Mapping[str, str], what: str, remedy: str) -> dict[str, str]:
    """Return, in words, how far above the usual number each device is that is above the most."""
    usual, most = usual_and_most(counts, tokens)
    return {
        name: f"{name} {what.format(count)}, and {usual} are the median of the devices of this federation: at most {most} are "
        f"taken from one device; the server's operator can {remedy}"
        for name, count in counts.items()
        if count > most
    }


def _size_of(proposal: Schema) -> int:
    """Return how much a proposal adds to the schema of all: categories may be embedded, or left out with their values."""
    columns = proposal.columns.values()
    values = sum(len(column.values) for column in columns if column.kind != "yes/no")
    return max(len(proposal.feature_names), len(columns), values, len(proposal.to_json()) // LONGEST_NAME)


def _unlike_columns(named: Mapping[str, Profile]) -> str:
    """Describe how the columns of devices differ from those of the first of them; empty if they do not."""
    if not named:
        return ""
    (one, first), *rest = named.items()
    clauses = [
        f"the shard of {name} {unlike}"
        for name, profile in rest
        if profile.kind == first.kind and (unlike := difference(profile.column_names, first.column_names))
    ]
    more = f" (and {len(clauses) - NAMED} more devices)" if len(clauses) > NAMED else ""
    return f"{'; '.join(clauses[:NAMED])}{more}, by the shard of {one}" if clauses else ""


def fitted(profile: Profile, form: ModelSpec | DataSettings) -> Profile:
    """Return the profile of the samples as their device fits them to a form, if it can; else the profile as it is.

    A channel that is missing has NaN for sums: the device tells none.
    """
    if not (weights := channel_weights(form, profile.shape, profile.column_names)):
        return profile
    columns, places = profile.columns, [row.index(1.0) if 1.0 in row else None for row in weights]
    if columns is not None:
        mean, squares = ([math.nan if at is None else of[at] for at in places] for of in (columns.mean, columns.squares))
        columns = Columns(columns.rows, mean, squares)
    names = list(form.channels or profile.column_names)
    return msgspec.structs.replace(profile, shape=tuple(form.shape), column_names=names, columns=columns)


def form_of(profile: Profile) -> Form:
    """Return the form of a device's data, without its numbers."""
    outputs = () if profile.task == "classes" else tuple(profile.labels)
    digest = profile.schema.digest if isinstance(profile.schema, Schema) else ""
    return profile.kind, profile.shape, profile.per_position, profile.task, outputs, digest


def check_possible(profile: Profile, name: str) -> None:
    """Check the numbers of a profile, which go into the ledger and the model.

    Raises:
        SettingError: No shard can have them.
    """
    bounds = {
        "samples": (1, profile.samples, MAX_COUNT),
        "test_samples": (0, profile.test_samples, MAX_COUNT),
        "vocabulary": (0, profile.vocabulary, MAX_VOCABULARY),
    }
    for named, (least, value, most) in bounds.items():
        if not least <= value <= most:
            raise SettingError(f"{name} declares {named} = {value}; it must lie between {least} and {most}")
    if not 1 <= len(profile.shape) <= 3 or min(profile.shape) < 1 or math.prod(profile.shape) > MAX_SAMPLE_VALUES:
        raise SettingError(
            f"{name} declares samples of the impossible shape {profile.shape[:4]}: 1 to 3 sizes, {MAX_SAMPLE_VALUES} values"
        )
    if profile.per_position and profile.kind not in POSITIONED:
        raise SettingError(
            f"{name} declares a label for every position of {profile.kind}; only tokens and images can have that"
        )
    if profile.per_position and profile.task != "classes":
        raise SettingError(f"{name} declares {profile.task} for every position; only classes can have that")
    if profile.task == "survival" and len(profile.labels) != len(TIME_AND_EVENT):
        raise SettingError(f"{name} declares {len(profile.labels)} columns of survival: a time and an event are needed")
    if profile.kind != "tabular" and (profile.schema, profile.proposal) != (msgspec.UNSET, msgspec.UNSET):
        raise SettingError(f"{name} declares the columns of a table, and has {profile.kind}")
    if profile.labels or profile.task != "classes":  # a device whose data leave only with noise tells no classes
        _check_labels(profile.labels, name)
    check_declared_sums(profile, name)
    for schema in (profile.schema, profile.proposal):
        if isinstance(schema, Schema):
            schema.check(f"the schema of {name}")
    if isinstance(profile.schema, Schema) and profile.column_names != profile.schema.feature_names:
        raise SettingError(f"{name} declares other columns than the features of its schema")
    if profile.column_names and (wrong := _wrong_names(profile)):
        raise SettingError(f"{name} declares {wrong}")


def _check_labels(labels: Collection[Label], name: str) -> None:
    if not labels or len(set(labels)) < len(labels):
        raise SettingError(f"{name} declares no labels, or one of them twice")
    texts = [str(label) for label in labels]
    if len(texts) > MAX_LABELS or sum(map(len, texts)) > MAX_LABELS_BYTES:
        raise SettingError(
            f"{name} declares {len(texts)} labels of {sum(map(len, texts))} characters; at most {MAX_LABELS} labels of "
            f"{MAX_LABELS_BYTES} characters together are possible"
        )
    if any(len(text) > LONGEST_LABEL or not text.isprintable() for text in texts):
        raise SettingError(f"{name} declares a label of more than {LONGEST_LABEL} characters, or one that cannot be printed")


def check_declared(profile: Profile, declared: DataSettings, name: str) -> None:
    """Check a profile against what the operator has declared.

    Raises:
        ShapeMismatch: Kind, shape, task, vocabulary or columns differ.
        UndeclaredLabels: Labels occur that are not declared, or the device does not tell which ones occur.
    """
    if (schema := declared.schema) is not None:
        profile = in_schema(profile, schema)
        if profile.kind == "tabular" and form_of(profile)[-1] != schema.digest:
            raise _unlike(profile, msgspec.structs.replace(profile, schema=schema), name)
    profile = fitted(profile, declared)
    kind, shape = declared.kind or profile.kind, tuple(declared.shape or profile.shape)
    if profile.kind == kind:
        _check_columns(profile, declared.names, name)
    if (profile.kind, profile.shape) != (kind, shape):
        raise ShapeMismatch(_mismatch(name, profile, kind, shape))
    if declared.task is not None and profile.task != declared.task:
        raise ShapeMismatch(_other_task(name, profile, declared.task, declared.classes))
    _check_vocabulary(profile, declared.vocabulary, name)
    if declared.classes:
        _check_known(profile.labels, declared.classes, name)
    elif not profile.labels:
        raise UndeclaredLabels(
            f"{name} does not tell which classes occur in its data (--max-epsilon), and data.classes is not set: declare all "
            "classes there before round 1, or at the device in the `classes` of its meta.json"
        )


def check_fits(profile: Profile, plan: Plan, name: str) -> None:
    """Check a profile against the plan.

    Raises:
        ShapeMismatch: Kind, shape, task, vocabulary or columns differ.
        UndeclaredLabels: Labels occur that the plan does not have.
    """
    model, profile = plan.model, fitted(profile, plan.model)
    planned = Profile(
        model.kind,
        model.shape,
        plan.classes,
        0,
        0,
        per_position=model.per_position,
        column_names=plan.column_names,
        task=plan.task,
        schema=plan.schema or msgspec.UNSET,
    )
    if plan.schema is not None:
        profile = in_schema(profile, plan.schema)
        if profile.kind == "tabular" and profile.schema is msgspec.UNSET:
            raise without_schema(name)
    if form_of(profile) != form_of(planned):
        raise _unlike(profile, planned, name)
    _check_columns(profile, plan.column_names, name)
    _check_vocabulary(profile, model.vocabulary, name)
    _check_known(profile.labels, plan.classes, name)


def some(labels: Collection[Label]) -> str:
    """Return the first labels as text, and how many more there are."""
    return f"[{listed([repr(label) for label in labels], NAMED)}]"


def _wrong_names(profile: Profile) -> str:
    if profile.kind == "tokens":
        return "names of columns for tokens"
    return wrong_with(profile.column_names, profile.shape[-1])


def _check_columns(profile: Profile, expected: Sequence[str], name: str) -> None:
    if unlike := difference(profile.column_names, expected):
        raise ShapeMismatch(_other_columns(name, unlike, expected))


def _other_columns(name: str, unlike: str, expected: Sequence[str]) -> str:
    return f"the shard of {name} {unlike}; {remedy(expected)}"


def _check_vocabulary(profile: Profile, vocabulary: int, name: str) -> None:
    """Check that the model knows all tokens of a profile. A device whose data leave only with noise tells of none."""
    if profile.kind == "tokens" and not profile.vocabulary and not vocabulary:
        raise ShapeMismatch(
            f"{name} does not tell which tokens occur in its data (--max-epsilon), and data.vocabulary is not set: declare the "
            "number of tokens there before round 1, or at the device in the `vocabulary` of its meta.json"
        )
    if profile.kind == "tokens" and vocabulary and profile.vocabulary > vocabulary:
        raise ShapeMismatch(f"{name} has tokens up to {profile.vocabulary - 1}; this federation knows 0 to {vocabulary - 1}")


def _check_known(labels: Iterable[Label], classes: Collection[Label], name: str) -> None:
    known = {str(label) for label in classes}  # 1 is "1"
    unknown = [label for label in labels if str(label) not in known]
    if unknown:
        alike = _by_look(tuple(classes))
        hints = [f"{label!r} looks like {alike[look(label)]!r}" for label in unknown[:NAMED] if look(label) in alike]
        more = f" ({'; '.join(hints)}: write it so)" if hints else ""
        raise UndeclaredLabels(
            f"{name} has labels {some(unknown)}{more}; the classes of this federation are fixed: {some(classes)}"
        )


@lru_cache(maxsize=4)  # a peer can be refused again and again, and the classes may be many
def _by_look(classes: tuple[Label, ...]) -> dict[str, Label]:
    return {look(label): label for label in classes}


def _unlike(profile: Profile, reference: Profile, name: str) -> ShapeMismatch:
    unlike = difference(profile.column_names, reference.column_names)
    if unlike and profile.kind == reference.kind and profile.shape != reference.shape:
        return ShapeMismatch(_other_columns(name, unlike, reference.column_names))
    if (profile.kind, profile.shape) != (reference.kind, reference.shape):
        return ShapeMismatch(_mismatch(name, profile, reference.kind, reference.shape))
    if (profile.task, profile.labels) != (reference.task, reference.labels) and {profile.task, reference.task} != {"classes"}:
        return ShapeMismatch(_other_task(name, profile, reference.task, reference.labels))
    if form_of(profile)[-1] != form_of(reference)[-1]:
        return ShapeMismatch(
            f"the table of {name} is read by another schema than this federation's ({form_of(reference)[-1][:15]} by its "
            f"digest): start {name} with {OPTION}, or with the federation's file"
        )
    words = ("pixel", "image") if profile.kind == "images" else ("position", "sequence")
    has, needs = words if profile.per_position else reversed(words)
    return ShapeMismatch(
        f"the shard of {name} has a label for every {has}; this federation expects one for every {needs}. "
        f"Convert its y (one for every {words[0]} has the shape of x), or start a federation of its own"
    )


def _other_task(name: str, profile: Profile, task: TaskName, outputs: Sequence[Label]) -> str:
    return (
        f"the shard of {name} is for {asked(profile.task, profile.labels)}; this federation is for {asked(task, outputs)}. "
        f"y must be {TASKS[task].needs}: set `task` in meta.json (or --task), or start a federation of its own"
    )


def _mismatch(name: str, profile: Profile, kind: str, shape: tuple[int, ...]) -> str:
    return (
        f"the shard of {name} holds {profile.kind} of shape {profile.shape}; this federation expects {kind} of shape {shape}. "
        "Convert the shard, or start a federation of its own. Images and series can be fitted to data.shape (data.fit); other "
        "channels need names (data.columns, and `columns` in meta.json)"
    )


def _words(form: Form) -> str:
    kind, shape, per_position, task, outputs, digest = form
    if digest:
        return f"{kind} of shape {shape} by the schema {digest[:15]}"
    more = ", labelled at every position" if per_position else f", for {asked(task, outputs)}" if outputs else ""
    return f"{kind} of shape {shape}{more}"
