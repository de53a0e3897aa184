"""Votes of the sites: on the schema of their tables, so that none alone can stop a federation; the plan's classes and score.

The classes are the union of what the devices have, each class once, whatever a site's table looks like.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import msgspec

from attune.common.classes import NO, YES, look_alikes, other_forms
from attune.common.config import TrainSettings
from attune.common.errors import AttuneError, SettingError, ShapeMismatch
from attune.common.plan import RARE, Label, Profile
from attune.common.schema import MAX_VALUES, ORIGIN, Column, Schema
from attune.common.text import clean, listed
from attune.fedserver.core.data_form import MAX_LABELS
from attune.fedserver.core.table_schemas import (
    OPTION,
    conflict_in,
    holders_of,
    in_schema,
    merge_proposals,
    merged,
    without_schema,
)
from attune.fedserver.core.voices import majority, usual_and_most, votes_of

FEWEST_VOICES = 3  # with fewer no site is outvoted
OTHERS = "most other devices"
Votes = Mapping[str, Fraction]


def check_training(train: TrainSettings, first: Profile) -> None:
    """Refuse (SettingError) settings of training that are for other data than those of the devices."""
    if train.augment and first.kind != "images":
        raise SettingError(f"train.augment is for images, and the devices have {first.kind}; leave it out")
    if first.labels_pixels and (moving := sorted({"flip", "crop", "erase"}.intersection(train.augment or ()))):
        raise SettingError(f"train.augment: {listed(moving)} would move or hide pixels and not their labels; leave it out")
    if train.loss == "dice" and not first.labels_pixels:
        raise SettingError('train.loss = "dice" is for images with a label for every pixel; leave it out')


def score_of(train: TrainSettings, classes: Sequence[Label], profiles: Sequence[Profile]) -> dict[str, Any]:
    """Return the plan's `score`, and why; empty for the task's own score.

    Raises:
        SettingError: The data have no two classes to be ranked.
    """
    first, rare = profiles[0], sum(profile.rare is True for profile in profiles)
    if first.labels_pixels:
        if len(classes) < 2:
            raise SettingError("every pixel at all sites has one class: there is nothing to tell apart")
        if train.score in ("dice", "iou", "accuracy"):
            return {} if train.score == "accuracy" else {"score": train.score}
        if train.score != "auroc":
            return {"score": "dice", "rare": "every pixel has a label, and most pixels show background"}
    if train.score in ("dice", "iou"):
        raise SettingError(f'train.score = "{train.score}" is for images with a label for every pixel; leave it out')
    ranks = first.task == "classes" and len(classes) == 2 and not first.per_position
    if train.score == "auroc":
        if not ranks:
            raise SettingError('train.score = "auroc" is for two classes with one label a sample; leave it out')
        return {"score": "auroc"}
    if train.score == "accuracy" or not ranks or 2 * rare <= len(profiles):
        return {}
    return {
        "score": "auroc",
        "rare": f"one of two classes has less than {RARE:.0%} of the samples at {rare} of {len(profiles)} sites",
    }


def united(
    profiles: Mapping[str, Profile], declared: Schema | None, tokens: Mapping[str, str] | None = None
) -> tuple[dict[str, Profile], dict[str, AttuneError]]:
    """Return the profiles with all tables in one schema, and an error for each device that cannot have it.

    The schema is the declared one, else the one that most devices bring, else the merge of what they propose. Without any of
    these, or if most tables are read without one, there is none.

    Args:
        profiles: By device.
        declared: The operator's schema.
        tokens: The join token of each device. Devices of one token share one vote.

    Raises:
        SettingError: Proposals contradict each other, and no majority decides it.
    """
    tables = {name: profile for name, profile in profiles.items() if profile.kind == "tabular"}
    plain = {name for name, profile in tables.items() if profile.schema is msgspec.UNSET and profile.proposal is msgspec.UNSET}
    schema, odd = (declared, {}) if declared is not None else _decided(tables, plain, tokens or {})
    if schema is not None:
        odd |= {name: without_schema(name) for name in plain}
    rest = {name: profile for name, profile in profiles.items() if name not in odd}
    return rest if schema is None else {name: in_schema(profile, schema) for name, profile in rest.items()}, odd


def _decided(
    tables: Mapping[str, Profile], plain: set[str], tokens: Mapping[str, str]
) -> tuple[Schema | None, dict[str, AttuneError]]:
    """Return the schema of most tables, and an error for each device that has contradicted it."""
    brought = {name: profile.schema for name, profile in tables.items() if isinstance(profile.schema, Schema)}
    proposals = {name: _bounded(profile.proposal) for name, profile in tables.items() if isinstance(profile.proposal, Schema)}
    if not brought and not proposals:
        return None, {}
    votes = votes_of(tables, tokens)
    whole = sum(votes.values())
    if 2 * sum(votes[name] for name in plain) > whole:
        return None, {
            name: ShapeMismatch(
                f"{name} has a schema for its table, and most devices of this federation read theirs without one: start it "
                "without --schema"
            )
            for name in sorted({*brought, *proposals})
        }
    outvoted: dict[str, AttuneError] = {}
    if brought and _is_majority(sum(votes[name] for name in proposals), whole):
        outvoted = {
            name: ShapeMismatch(
                f"{name} brings a schema, and most devices of this federation propose one: start it with {OPTION}"
            )
            for name in brought
        }
    elif brought:
        # a table without a schema has a vote as well
        digest = majority({name: brought[name].digest if name in brought else "" for name in tables}, votes)
        if not digest:
            different = len({schema.digest for schema in brought.values()})
            raise SettingError(
                f"devices bring {different} different schemas, and {len(proposals)} propose one: declare the schema in the "
                f"settings of the server (data.columns), or start all devices with {OPTION}"
            )
        return next(schema for schema in brought.values() if schema.digest == digest), {}
    schema, contradicting = _of_proposals(proposals, tokens)
    return schema, outvoted | contradicting


def _bounded(proposal: Schema) -> Schema:
    """Return a proposal without what only an operator decides for all sites, and `describe` never proposes."""
    columns = {
        name: msgspec.structs.replace(
            column,
            missing="fill" if column.missing == "refuse" else column.missing,
            range=None,
            origin=ORIGIN,
        )
        for name, column in proposal.columns.items()
    }
    return Schema(columns)


def _of_proposals(proposals: Mapping[str, Schema], tokens: Mapping[str, str]) -> tuple[Schema, dict[str, AttuneError]]:
    """Return the merge of the proposals, and an error for each site that more than two thirds of the voices contradict.

    Raises:
        SettingError: Others contradict each other too.
    """
    try:
        return merge_proposals(proposals), {}
    except SettingError:
        votes = votes_of(proposals, tokens)
        reasons = _contradicting(proposals, votes, tokens)
        rest = {name: proposal for name, proposal in proposals.items() if name not in reasons}
        if not reasons or not _is_majority(sum(votes[name] for name in rest), sum(votes.values())):
            raise
        return merge_proposals(rest), {
            name: ShapeMismatch(
                f"{name} proposes columns that contradict those of more than two thirds of the devices: {clean(reason)}"
            )
            for name, reason in reasons.items()
        }


def _is_majority(votes: Fraction | int, whole: Fraction | int) -> bool:
    return whole >= FEWEST_VOICES and 3 * votes > 2 * whole


def _outvote(against: Fraction, whole: Fraction, votes: Votes) -> bool:
    """Return whether voices outvote a device: most of those that have the column or value, and a third of all.

    Otherwise a few liars would shut out the honest device that alone has a column.
    """
    return _is_majority(against, whole) and 3 * against > sum(votes.values())


def _contradicting(proposals: Mapping[str, Schema], votes: Votes, tokens: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with each site that most others contradict: first by column, then with what most sites have."""
    reasons: dict[str, str] = {}
    usual: dict[str, Column] = {}
    whole = sum(votes.values())
    for name in sorted({name for schema in proposals.values() for name in schema.columns}):
        sites = holders_of(name, proposals)
        odd = _odd_in(name, sites, votes, tokens)
        reasons = odd | reasons
        agreeing = {site: column for site, column in sites.items() if site not in odd}
        if _is_majority(sum(votes[site] for site in agreeing), whole):
            usual[name] = merged(list(agreeing.values()), is_lacking=False, common=False)
    for site, proposal in proposals.items():
        if usual and site not in reasons:
            try:
                merge_proposals({OTHERS: Schema(usual), site: proposal})
            except SettingError as conflict:
                reasons[site] = str(conflict).rpartition("\n")[2]
    return reasons


def _odd_in(name: str, sites: Mapping[str, Column], votes: Votes, tokens: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with each site whose description of a column more than two thirds of the voices contradict."""
    whole = sum((votes[site] for site in sites), Fraction())
    if whole < FEWEST_VOICES or not conflict_in(name, sites):
        return {}
    odd: dict[str, str] = {}
    variants: dict[bytes, list[str]] = defaultdict(list)
    short = {
        site: column if column.kind == "yes/no" else msgspec.structs.replace(column, values=[])
        for site, column in sites.items()
    }
    for site, column in short.items():
        variants[msgspec.json.encode((column.kind, column.unit, column.form, column.values))].append(site)
    for names in variants.values():
        against = [
            others
            for others in variants.values()
            if others is not names and conflict_in(name, {OTHERS: short[others[0]], names[0]: short[names[0]]})
        ]
        if _outvote(sum((votes[site] for others in against for site in others), Fraction()), whole, votes):
            largest = max(against, key=lambda others: sum(votes[site] for site in others))
            odd |= {site: conflict_in(name, {OTHERS: short[largest[0]], site: short[site]}) for site in names}
    values = {site: column.values for site, column in sites.items() if site not in odd}
    return _odd_values(name, values, votes, tokens) | odd


def _odd_values(name: str, values: Mapping[str, list[str]], votes: Votes, tokens: Mapping[str, str]) -> dict[str, str]:
    """Return what is wrong with each site that writes a value otherwise than most, or has far more of them than usual."""
    holders: dict[str, set[str]] = defaultdict(set)
    for site, texts in values.items():
        for text in texts:
            holders[text].add(site)
    odd: dict[str, str] = {}
    if len(holders) > MAX_VALUES:
        usual, most = usual_and_most({site: len(texts) for site, texts in values.items()}, tokens)
        odd |= {
            site: f"{name}: {len(texts)} values, and {usual} are usual" for site, texts in values.items() if len(texts) > most
        }
    for group in look_alikes(holders):
        everybody = set().union(*(holders[text] for text in group))
        whole = sum((votes[site] for site in everybody), Fraction())
        usual_text = max(group, key=lambda text: sum(votes[site] for site in holders[text]))
        others = everybody - holders[usual_text]
        if _outvote(whole - sum((votes[site] for site in others), Fraction()), whole, votes):
            odd |= dict.fromkeys(others, f"{name}: a value looks like {usual_text!r} of {OTHERS}: write it so")
    return odd


_SHOWN, LONGEST_SHOWN = 4, 100  # classes that an error names, and characters of one
REMEDY = "Write each class in one way at all sites; or, if these are different classes, declare all classes in data.classes"


def united_classes(profiles: Mapping[str, Profile], declared: Sequence[Label]) -> list[Label]:
    """Return the classes of the plan, sorted: those that the operator declares, else the union over the devices.

    If any device has text labels, every label is its written text, so 1 and "1" are one class.

    Raises:
        SettingError: Classes that nobody declared look alike, or seem to be one class that is written in two ways.
    """
    if declared:
        return sorted(set(declared), key=lambda label: (isinstance(label, str), label))
    labels = {label for profile in profiles.values() for label in profile.labels}
    if len(labels) > MAX_LABELS:
        most = max(profiles, key=lambda name: len(profiles[name].labels))
        raise SettingError(
            f"the devices declare {len(labels)} classes together, {len(profiles[most].labels)} of them {most}; at most "
            f"{MAX_LABELS} are possible. Revoke the devices that are wrong, or declare data.classes"
        )
    if all(isinstance(label, int) for label in labels):
        return sorted(labels)
    _check_apart(profiles)
    return sorted({str(label) for label in labels})


def _check_apart(profiles: Mapping[str, Profile]) -> None:
    by_device = [frozenset(map(str, profile.labels)) for profile in profiles.values()]
    labels = frozenset().union(*by_device)
    if words := _yes_and_no(by_device):
        everything = msgspec.json.encode(sorted(labels)).decode()
        usual = [max(group, key=lambda label: sum(label in have for have in by_device)) for group in words]
        pairs = [f"{label}={one}" for group, one in zip(words, usual, strict=True) for label in group if label != one]
        raise SettingError(
            f"some devices seem to say yes and no in other words: {_described(words, profiles)}. {REMEDY}, by the line "
            f"`classes = {everything}` in [data]. To write them alike, add `--map 'LABEL:{','.join(pairs)}'` to fedclient there"
        )
    groups = look_alikes(labels)
    if groups:
        raise SettingError(f"classes of the devices look alike: {_described(groups, profiles)}. {REMEDY}")
    forms: dict[str, set[str]] = defaultdict(set)
    for label in sorted(labels):
        for form in other_forms(label):
            forms[form].add(label)
    several = [sorted(group) for group in forms.values() if len(group) > 1]
    twice = [group for group in dict.fromkeys(map(tuple, several)) if not any(len(have & {*group}) > 1 for have in by_device)]
    if twice:
        raise SettingError(
            "classes differ only by zeros, signs, marks or accents that programs add and remove, and no device has both: "
            f"{_described(twice, profiles)}. {REMEDY}"
        )


def _yes_and_no(by_device: Sequence[Collection[str]]) -> list[list[str]]:
    """Return the words for no and those for yes, if together the devices have several words for one.

    If a device has other classes too, only pairs in whole words count: such letters and digits are classes of many data.
    """
    words = [sorted(label for have in by_device for label in have if label.casefold() in meaning) for meaning in (NO, YES)]
    known = {*words[0], *words[1]}
    several = [list(dict.fromkeys(group)) for group in words if len({label.casefold() for label in group}) > 1]
    pairs = len(several) == 2 and min(map(len, known)) > 1 and all(len(known & have) in (0, 2) for have in map(set, by_device))
    if not several or not (pairs or all(known.issuperset(have) for have in by_device)):
        return []
    return [] if any(len(have & {*group}) > 1 for have in map(set, by_device) for group in several) else several


def classes_apart(labels: Mapping[str, Collection[str]]) -> str:
    """Warn that no class of some devices occurs at another one: another task, or the same classes in other words.

    Args:
        labels: The classes of each device.
    """
    holders = Counter(label for have in labels.values() for label in set(have))
    apart = [name for name in sorted(labels) if labels[name] and all(holders[label] == 1 for label in labels[name])]
    if not apart or len(labels) < 2:
        return ""
    named = listed([f"{name} ({listed(sorted(labels[name]), _SHOWN)})" for name in apart], _SHOWN)
    return (
        f"no class of these devices occurs at another one: {named}. If they are the others' classes in other words, "
        "write them alike; if not, each is learned on one device alone"
    )


def _described(groups: Sequence[Sequence[str]], profiles: Mapping[str, Profile]) -> str:
    def written(label: str) -> str:
        holders = [name for name in sorted(profiles) if label in map(str, profiles[name].labels)]
        return f"{clean(label, LONGEST_SHOWN)!r} ({listed(holders, _SHOWN)})"

    clauses = [" and ".join(map(written, group[:_SHOWN])) + (" and more" * (len(group) > _SHOWN)) for group in groups[:_SHOWN]]
    more = f" and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    return f"{'; '.join(clauses)}{more}"
