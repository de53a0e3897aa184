"""Votes of the sites that propose a schema, so that one site alone cannot stop a federation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction

import msgspec

from attune.common.classes import look_alikes
from attune.common.errors import AttuneError, SettingError, ShapeMismatch
from attune.common.plan import Profile
from attune.common.schema import MAX_VALUES, ORIGIN, Column, Schema
from attune.common.text import clean
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
        if _is_majority(sum((votes[site] for others in against for site in others), Fraction()), whole):
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
        if _is_majority(whole - sum((votes[site] for site in others), Fraction()), whole):
            odd |= dict.fromkeys(others, f"{name}: a value looks like {usual_text!r} of {OTHERS}: write it so")
    return odd
