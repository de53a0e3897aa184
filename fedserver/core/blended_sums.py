"""The closed form of all devices' sums as a member of the blends of any method (docs/methods/analytic.md)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import msgspec

from attune.common.plan import Plan, Profile

FEWEST_SUMS = 2  # devices; the sums of one device would say nothing that it does not know
MOST_DEVICES = 200  # the server keeps 1 MB of each device, and a simulation 2 MB
MOST_INPUTS, MOST_OUTPUTS = 1 << 12, 100  # numbers of a sample, and scores


def with_closed_form(plan: Plan, profiles: Mapping[str, Profile], sums: Collection[str], without: str = "") -> Plan:
    """Return the plan with the closed form, or with the reason why there is none.

    Without a blend on the devices (`train.validation`) nothing is said.

    Args:
        plan: The plan without it.
        profiles: Descriptions of the devices' data.
        sums: Names of the devices that hand in sums.
        without: Why the settings rule it out; empty: they do not.
    """
    if not plan.train.validation:
        return plan
    why = without or _lacking(plan, profiles, sums)
    return msgspec.structs.replace(plan, closed_form=not why, no_closed_form=why)


def _lacking(plan: Plan, profiles: Mapping[str, Profile], sums: Collection[str]) -> str:
    """Return why these data have no closed form; empty: they have one."""
    kind = plan.model.kind
    if plan.task == "custom":
        return "a loss of your own has no known closed form"
    if kind == "tokens" or plan.model.per_position:
        return "it is for images, series and tables, with one answer for a sample"
    if math.prod(plan.model.shape) > MOST_INPUTS or plan.model.classes > MOST_OUTPUTS or len(profiles) > MOST_DEVICES:
        return f"it is for at most {MOST_INPUTS:,} numbers of a sample, {MOST_OUTPUTS} outputs and {MOST_DEVICES:,} devices"
    has_scale = kind == "images" or plan.scale is not None or plan.scaled_by_ranges
    if not has_scale or (plan.task == "regression" and plan.targets is None):
        statistics = "masked-statistics" if plan.one_sum else "statistics"
        return f"devices have no common scale: it takes --standardise federation and --disclose {statistics}"
    if len(profiles.keys() & set(sums)) < FEWEST_SUMS:
        return f"fewer than {FEWEST_SUMS} of {len(profiles)} devices allow it by --disclose sums"
    return ""
