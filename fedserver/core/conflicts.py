"""The list of features that cannot be combined, which is checked when the server starts: a row says which two, and why.

A feature is named by its setting: `round.take_back` is on where it has another value than its "off", and
`round.train = "all"` where it has this one.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from attune.common import conflicts
from attune.common.conflicts import Conflict
from attune.common.errors import SettingError
from attune.common.exchange.registry import SECURE_SUM
from attune.common.methods.method import check_task
from attune.common.methods.private_training import CONFLICTS as OF_DEVICES
from attune.common.methods.settings.aggregators import VOTES, ClosedFormSettings, HypernetworkSettings, MeanSettings
from attune.common.plan import FEWEST_DEVICES
from attune.common.protocol import MOST_MEMBERS
from attune.common.task import TaskName
from attune.fedserver.core.secure_policy import short_step

if TYPE_CHECKING:
    from attune.fedserver.core.planning import ResolvedSettings

SECURE, CLIENT, BUFFERED = "privacy.secure_aggregation", 'privacy.unit = "client"', 'round.mode = "buffered"'
EMBEDDED, DESCRIBED, ALL = 'method.embedding = "device"', 'method.embedding = "described"', 'round.train = "all"'
SURVIVAL, CUSTOM, VARIANTS = 'data.task = "survival"', 'data.task = "custom"', "model.variant"
OFF: tuple[Any, ...] = (False, 0, None, "", "none", "off", (), {}, msgspec.UNSET)
LEAST_VOTES = 5  # updates in a buffer, with which a vote is worth its name: one of them alone decides nothing
# benchmarks.client_level_generated, means of seeds 0 to 2
GENERATED = " (with 1,000 devices and epsilon = 8, FedTP was tried and has an accuracy of 0.65, FedPer of 0.83)"
SERVED, SINGLE = "each order must start from what the server serves", "it compares single updates"
DRAW = "only independent draws of each device may be counted on"
LIKELIHOODS = "it chooses by how likely each held-out sample is, and a Cox model gives no such likelihood. Leave it out"
GIVEN, TAGGED = "round.given", "round.devices"


def _units(feature: str, why: str, *units: str) -> list[tuple[str, str, str]]:
    """Return the conflicts of a feature with noise for these units, or for all of them."""
    return [(feature, f'privacy.unit = "{unit}"', why) for unit in units or ("example", "group", "client")]


PAIRS = [
    *_units(GIVEN, "nothing is trained"),
    (
        GIVEN,
        SECURE,
        "there is no update to sum, and each site's scores leave it as they are, or not (fedclient --metrics none)",
    ),
    (GIVEN, BUFFERED, "no round is opened"),
    (SECURE, "method.robust", "a robust rule compares single updates"),
    (SECURE, "round.take_back", "it looks at losses of single devices"),
    (SECURE, ALL, SERVED),
    (SECURE, "round.adapt_rounds", "few newcomers make no sum"),
    ("privacy.same_cohort", "round.over_selection", "no device takes another one's place"),
    *_units(DESCRIBED, "a description has no noise"),
    (EMBEDDED, "method.robust", "what devices hand in is a gradient, whose numbers are not to be voted on or clipped"),
    (EMBEDDED, "method.bound_samples", "a device weighs the step of its embedding by its own samples"),
    (EMBEDDED, "round.take_back", "the server cannot take embeddings back that it does not have"),
    (EMBEDDED, ALL, SERVED),
    (EMBEDDED, "round.adapt_rounds", "a newcomer's embedding is not on the server"),
    (BUFFERED, SECURE, "it needs rounds whose devices train at the same time"),
    (BUFFERED, CLIENT, "it needs rounds whose devices are drawn, and not the fastest ones"),
    (BUFFERED, EMBEDDED, "a device steps its embedding as if its update were fresh"),
    (BUFFERED, ALL, SERVED),
    (BUFFERED, "round.over_selection", "no update is left over (round.clients is how many devices train at a time)"),
    *_units(
        "round.patience", "each likelihood would cost a part of the budget, which is for a number of rounds. Set round.rounds"
    ),
    (TAGGED, BUFFERED, "orders go on from round to round, to all devices"),
    (TAGGED, CLIENT, DRAW),
    (TAGGED, "round.adapt_rounds", "newcomers have rounds of their own, whatever their tag"),
    (CLIENT, SECURE, "the server clips single updates"),
    (CLIENT, "method.bound_change", SINGLE),
    (CLIENT, "method.bound_samples", SINGLE),
    (CLIENT, "method.robust", SINGLE),
    (CLIENT, "server.max_update_norm", "changes are clipped, and a refusal tells their norm"),
    (CLIENT, "round.take_back", "it looks at losses of single devices"),
    (CLIENT, "round.adapt_rounds", "newcomers' rounds have no noise"),
    (CLIENT, ALL, SERVED),
    *((CLIENT, f"round.{name}", DRAW) for name in ("quorum", "over_selection", "replace_after_s", "attackers")),
    *_units(
        SURVIVAL,
        f"the Cox loss is that of a whole batch, so no sample has a gradient that could be clipped. Take {CLIENT}, or {SECURE}",
        "example",
        "group",
    ),
    *(
        (CUSTOM, f'privacy.unit = "{unit}"', f"a loss of your own may compare samples, so none can be clipped. Take {CLIENT}")
        for unit in ("example", "group")
    ),
    (VARIANTS, SECURE, "a sum would be of one variant's devices, who may be too few"),
    (VARIANTS, CLIENT, "sums are divided by the number of all devices"),
    (VARIANTS, EMBEDDED, "a device weighs its embedding's steps by the updates of all devices"),
    (VARIANTS, DESCRIBED, "descriptions are made by the plan's model"),
    (VARIANTS, "round.attackers", "attackers may all choose one variant, and outvote it in any cohort"),
    (SURVIVAL, "method.dial", LIKELIHOODS),
    (SURVIVAL, "train.score_after", f"{LIKELIHOODS}; in place of --method auto name a method"),
]
BY_LIKELIHOOD = ("method.dial", "train.score_after", "round.patience")  # `--method auto` sets the second
NEEDS = [
    Conflict(
        f"{CUSTOM} cannot be combined with {{why}}, which goes by how likely held-out samples are: give the class Measure a "
        "function likelihood, or in place of --method auto name a method",
        lambda s: not s.likely and next((name for name in BY_LIKELIHOOD if is_on(s, name)), ""),
    ),
    Conflict(
        f"privacy.same_cohort and round.left_out are for secure sums: they need {SECURE} = true",
        lambda s: (s.privacy.same_cohort or s.round.left_out) and not s.privacy.secure_aggregation,
    ),
    Conflict("round.left_out needs privacy.same_cohort = true", lambda s: bool(s.round.left_out) and not s.privacy.same_cohort),
    Conflict(
        f"{SECURE} gives the server sums alone, and method {{s.configured.method.name}} has {{why}} parts that are no means: "
        f"choose a method with shared parts, such as fedavg, fedper or fedbn, or generated ones with {EMBEDDED}",
        lambda s: s.privacy.secure_aggregation and next((p for p, one in s.parts if not _is_summed(one)), ""),
    ),
    Conflict(
        f"{SECURE} needs steps of the server that are a tenth of the usual ones or more, and {{why}}",
        lambda s: s.privacy.secure_aggregation and next(filter(None, (short_step(one) for _, one in s.parts)), ""),
    ),
    Conflict(
        f"{SECURE} with privacy.secure_spare = {{s.privacy.secure_spare}}: set privacy.secure_devices to {{why}} or more",
        lambda s: (
            s.privacy.secure_aggregation
            and s.privacy.secure_devices <= 2 * s.privacy.secure_spare
            and 2 * s.privacy.secure_spare + 1
        ),
    ),
    Conflict(
        f"{SECURE} cannot be combined with privacy.secure_devices = {{s.privacy.secure_devices}}: sums over samples have at "
        f"least {FEWEST_DEVICES} devices. With fewer, do without (fedclient --disclose sums), or take another method",
        lambda s: s.privacy.secure_aggregation and s.configured.objective.adds_up and s.privacy.secure_devices < FEWEST_DEVICES,
    ),
    Conflict(
        f"{SECURE} cannot be combined with {{why}}: sums have at least {{s.privacy.secure_devices}} devices",
        lambda s: s.privacy.secure_aggregation and _too_few(s),
    ),
    Conflict(
        f"{SECURE} cannot be combined with round.clients = {{s.round.clients}}: sums have {{s.privacy.secure_devices}} to "
        f"{MOST_MEMBERS} devices",
        lambda s: (
            s.privacy.secure_aggregation
            and s.round.clients
            and not s.privacy.secure_devices <= s.round.clients * (1 + s.round.over_selection) <= MOST_MEMBERS
        ),
    ),
    Conflict(
        f"{BUFFERED} cannot be combined with method {{s.configured.method.name}}: sums are handed in once",
        lambda s: s.round.mode == "buffered" and s.configured.objective.adds_up,
    ),
    Conflict(
        f"{BUFFERED} cannot be combined with method.robust = {{why!r}} and round.buffer = {{s.round.buffer}}: a vote needs at "
        f"least {LEAST_VOTES} updates",
        lambda s: (
            s.round.mode == "buffered"
            and s.round.buffer < LEAST_VOTES
            and next((rule for rule in VOTES if is_on(s, f'method.robust = "{rule}"')), "")
        ),
    ),
    Conflict(
        f"{VARIANTS} cannot be combined with method {{s.configured.method.name}}: its sums know no network",
        lambda s: bool(s.variants) and s.configured.objective.adds_up,
    ),
    Conflict(
        f"{BUFFERED} cannot be combined with an encoding of attended parts that is a change from the served value; take bf16, "
        "or none (round.encodings)",
        lambda s: s.round.mode == "buffered" and s.encodings.handed_in.get("attended", "") in ("int8", "zstd"),
    ),
    Conflict(
        f"privacy.clip_quantile needs {CLIENT}: elsewhere no noisy count of changes is made",
        lambda s: s.privacy.clip_quantile is not None and not s.privacy.on_server,
    ),
    Conflict(
        f"{CLIENT} is for methods whose devices share one value, such as fedavg, fedper or mr-mtl; method "
        '{s.configured.method.name} has {why}. Take privacy.unit = "example" for them',
        lambda s: (
            s.privacy.on_server
            and next(
                (
                    f"{part} parts, of which each device gets another value{GENERATED * isinstance(one, HypernetworkSettings)}"
                    for part, one in s.parts
                    if not isinstance(one, MeanSettings)
                ),
                "",
            )
        ),
    ),
    Conflict(
        f"{CLIENT} needs privacy.devices, the number of devices in the federation: sums are divided by it",
        lambda s: s.privacy.on_server and s.privacy.devices < 1,
    ),
    Conflict(
        "round.clients = {s.round.clients} is more than privacy.devices = {s.privacy.devices}",
        lambda s: s.privacy.on_server and s.round.clients > s.privacy.devices,
    ),
    Conflict(
        'round.adapt = "{s.round.adapt}": method {s.configured.method.name} generates nothing; take "personal"',
        lambda s: s.round.adapt in ("embedding", "hypernetwork") and all(one.embeddings == "none" for _, one in s.parts),
    ),
    Conflict(
        'round.adapt = "embedding": embeddings are fixed (method.embedding); take "hypernetwork"',
        lambda s: s.round.adapt == "embedding" and any(one.embeddings == "fixed" for _, one in s.parts),
    ),
    *OF_DEVICES,
]
STEPS = {  # the settings of steps on an update that are no transforms of [transforms]
    SECURE_SUM: SECURE,
    "sample-bound": "method.bound_samples",
    "change-bound": "method.bound_change",
    "votes": "method.robust",
    "norm-limit": "server.max_update_norm",
    **dict.fromkeys(("bf16", "int8", "zstd"), "round.encoding"),
}


def is_on(s: Any, feature: str) -> bool:
    """Return whether the settings `s` have a feature, which is named by its setting."""
    name, _, value = feature.partition(" = ")
    section, _, key = name.partition(".")
    configured = s.configured
    tables = [getattr(s, section)] if section != "method" else [*configured.aggregators.values(), configured.objective]
    values = [getattr(table, key) for table in tables if hasattr(table, key)]
    return any(
        one == value.strip('"') if value else one not in OFF and not (isinstance(one, float) and one < 0) for one in values
    )


def _is_summed(part: Any) -> bool:
    """Return whether a sum of devices' updates is all that the server needs of a part."""
    on_device = isinstance(part, HypernetworkSettings) and part.on_device
    return isinstance(part, (ClosedFormSettings, MeanSettings)) or on_device


def _too_few(s: Any) -> str:
    """Return the setting with which a round could close with fewer devices than a sum has; empty if there is none."""
    least = s.privacy.secure_devices
    given = {"round.min_clients": s.round.min_clients, "round.quorum": s.round.quorum or least}
    return next((f"{name} = {value}" for name, value in given.items() if value < least), "")


def check_conflicts(settings: ResolvedSettings, task: TaskName | None = None, likely: bool = True) -> None:
    """Check that no two features exclude each other.

    Args:
        settings: The settings of the run.
        task: The task of the data, once it is known; without it, what depends on it is not checked.
        likely: Whether samples have a likelihood; only a user's own measure may have none.

    Raises:
        SettingError: Two do. It names both.
    """
    s = SimpleNamespace(**vars(settings), likely=likely, parts=[*settings.configured.aggregators.items()])
    s.data, s.model = msgspec.structs.replace(settings.data, task=task), SimpleNamespace(variant=settings.variants)
    for one, other, why in PAIRS:
        if is_on(s, one) and is_on(s, other):
            raise SettingError(f"{one} cannot be combined with {other}: {why}")
    conflicts.check(NEEDS, s)
    for part, aggregator in s.parts:
        encoding = settings.encodings.handed_in[part]
        steps = {
            encoding: encoding,
            "sample-bound": aggregator.bound_samples,
            "change-bound": aggregator.bound,
            "votes": aggregator.no_vote,
            "norm-limit": settings.server.max_update_norm,
        }
        chosen = {name: one.excludes for name, one in settings.encodings.transforms.items() if one.applies_to(part)}
        present = [*(name for name, used in steps.items() if used), *chosen]
        excluded = [(name, other) for name in chosen for other in present if other in chosen[name] and other != name]
        for name, other in excluded:
            settings_of = " and ".join(STEPS.get(one, f"transforms.{one}") for one in (name, other))
            raise SettingError(f"the transforms {name} and {other} cannot be combined ({part}): {settings_of}")
        if wrong := sorted(aggregator.excludes.intersection(present)):
            raise SettingError(
                f"{wrong[0]} cannot be combined with method {settings.method.name}, whose {part} part is handed in as exact "
                f"sums: leave {STEPS.get(wrong[0], wrong[0])} out"
            )
    if task is not None:
        check_task(settings.configured, task)
