"""Statistics of a device's data on their way to the server: only if its owner discloses them, and beside noise only noisy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version

import msgspec

from attune import DISTRIBUTION
from attune.common.errors import HomeMismatch, SettingError, UpdateRefused, WireError
from attune.common.exchange.messages import (
    Description,
    Hello,
    SecureMessage,
    StatisticsReport,
    StatisticsRequest,
    UnitReport,
    Welcome,
)
from attune.common.exchange.registry import SPOKEN_AS, TRANSFORMS
from attune.common.plan import MAIN, Plan, Profile
from attune.common.privacy.noisy_statistics import NoisyLayout
from attune.common.protocol import DESCRIPTION, EMPTY, IN_NO_SUM, MASKED, MASKED_SCALE, SPOKEN, SUMS
from attune.common.site_statistics import MOST_COLUMNS, Centre
from attune.common.text import from_json
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.site_sums import site_sketches, site_sums, units_of_shard
from attune.fedclient.gate import Gate
from attune.fedclient.link.port import Link
from attune.fedclient.masked_disclosing import MOST_BYTES, MaskedDiscloser
from attune.fedclient.options import DeviceOptions
from attune.fedclient.store import Store
from attune.fedclient.work.worker import Worker

DESCRIBED_AT_ONCE = 256  # samples
DESCRIBED, REPORT, MASKED_SUM = "Description.moments", "StatisticsReport.report_json", "StatisticsReport.masked"
_version = functools.cache(version)  # it reads a file


def abilities(options: DeviceOptions, profile: Profile) -> tuple[str, ...]:
    """Return what a device can do beside the abilities of its version, because its owner allows it.

    That is statistics in a masked sum, a description of its data, and sums over its samples.
    """
    sums = (SUMS,) if "sums" in options.disclose else ()
    if not {"statistics", "masked-statistics"} & set(options.disclose):
        return sums
    scales = profile.columns is not None or profile.targets is not None
    described = (DESCRIPTION,) if Gate(options).allows(DESCRIBED) else ()
    return (MASKED, *([MASKED_SCALE] if scales else []), *described, *sums)


def hello_of(options: DeviceOptions, shard: LazyShard, empty: bool, in_no_sum: bool = True) -> Hello:
    """Return the first message to the server. It names the transforms of plug-ins too; plans are checked when they come."""
    transforms = (f"{SPOKEN_AS}{name}" for name in TRANSFORMS)
    scales_alone = shard.profile.kind in ("series", "tabular") and shard.profile.columns is None
    in_no_sum = in_no_sum and not scales_alone  # else sums over its samples mean something else than those of others
    variant, tag = msgspec.UNSET if options.variant == MAIN else options.variant, options.tag or msgspec.UNSET
    profile = msgspec.structs.replace(shard.profile, variant=variant, tag=tag)
    now = (word for word, is_so in ((EMPTY, empty), (IN_NO_SUM, in_no_sum)) if is_so)
    can = (*SPOKEN, *transforms, *abilities(options, shard.profile), *now)
    return Hello(f"attune {_version(DISTRIBUTION)}", msgspec.json.encode(Gate(options).profile(profile, shard.declares)), can)


async def tell_units(gate: Gate, shard: LazyShard, link: Link, worker: Worker, say: Callable[[str], None]) -> None:
    """Tell the server, and the person at the device, by a word how columns fit the ranges of the plan's schema.

    Nothing is told if there are no ranges, if training has noise, or if the owner forbids it.
    """
    plan = gate.plan
    if plan is None or plan.schema is None or not gate.allows("UnitReport.verdicts"):
        return
    if all(column.range is None for column in plan.schema.columns.values()):
        return
    verdicts = await worker.do(lambda: units_of_shard(shard.load_for(plan)))
    link.answer(UnitReport(dict(verdicts)))
    for column, verdict in verdicts.items():
        if verdict != "fits":
            say(f"warning: {column} does not fit the schema's range ({verdict}): is its unit the schema's?")


class Discloser:
    """Discloser of one device's data: answers to questions for statistics, one at a time, and a description.

    A question that comes during another one is dropped.
    """

    def __init__(
        self, options: DeviceOptions, shard: LazyShard, store: Store, link: Link, worker: Worker, say: Callable[[str], None]
    ) -> None:
        self._options, self._shard, self._link, self._worker, self._say = options, shard, link, worker, say
        self.masked = MaskedDiscloser(options, shard, store, link, worker, say)
        self._busy = False
        self._described: tuple[bytes, Description] | None = None  # the plan, and what is said under it

    async def describe(self, gate: Gate, plan_json: bytes) -> None:
        """Tell the server the moments of this device's inputs, if embeddings start from them and the owner allows it."""
        self._described, plan = None, gate.plan
        if plan is None or plan.method_options.get("embedding") != "described" or not Gate(self._options).allows(DESCRIBED):
            return
        said = await self._worker.do(_moments, self._shard, plan) if gate.allows(DESCRIBED) else ()
        self._described = plan_json, Description(said)
        self._link.answer(self._described[1])

    def heard(self, event: object) -> None:
        """Tell it again on a new stream: the server may be another process, which does not know it."""
        if isinstance(event, Welcome) and self._described is not None and event.plan_json == self._described[0]:
            self._link.answer(self._described[1])

    async def answer(self, question: StatisticsRequest, gate: Gate) -> None:
        """Answer a question, or say why not."""
        noisy = bool(question.noisy_json)
        masked = bool(question.layout_json) and not noisy  # a question for both is for noise alone
        if why := gate.objection(MASKED_SUM if masked else REPORT, noisy):
            self._link.answer(StatisticsReport(question.id, refused=why))
        elif masked:
            await self.masked.prepare(question)
        elif not self._busy:
            self._busy = True
            try:
                sums = await self._worker.do(self._noisy_sums if noisy else self._plain_sums, question, gate.plan)
                report = StatisticsReport(question.id, sums)
            except UpdateRefused as refusal:
                report = StatisticsReport(question.id, refused=str(refusal))
            finally:
                self._busy = False
            self._link.answer(report)

    async def exchange(self, message: SecureMessage, gate: Gate) -> None:
        """Answer a message of a masked sum, or say why not."""
        if why := gate.objection(MASKED_SUM):
            self._link.answer(SecureMessage(message.order_id, message.attempt, message.exchange, refused=why))
        else:
            await self.masked.answer(message)

    def _plain_sums(self, question: StatisticsRequest, plan: Plan | None) -> bytes:
        """Return the answer to a question for statistics as they are. It can refuse by UpdateRefused."""
        try:
            centres = from_json(question.centres_json, dict[str, Centre]) if question.centres_json else {}
        except msgspec.DecodeError as error:
            raise WireError(f"the server's question for statistics cannot be read ({error}): update one of the two") from None
        if len(centres) > MOST_COLUMNS or len(question.columns) > MOST_COLUMNS:
            raise UpdateRefused(f"the question is for more than {MOST_COLUMNS} columns")
        whole = self._shard.load()
        answer = site_sketches(whole, centres) if question.centres_json else site_sums(whole, question.columns)
        if (count := len(answer.columns)) > MOST_COLUMNS:
            raise UpdateRefused(f"its data have {count} columns: ask for at most {MOST_COLUMNS} of them (--columns)")
        text = msgspec.json.encode(answer)
        if len(text) > MOST_BYTES:
            raise UpdateRefused(f"its answer has {len(text):,} bytes: ask for fewer columns (--columns)")
        return text

    def _noisy_sums(self, question: StatisticsRequest, plan: Plan | None) -> bytes:
        """Return the answer to a question for statistics with noise. It can refuse by UpdateRefused. This imports torch."""
        from attune.fedclient.work.private.ledger import BudgetSpent
        from attune.fedclient.work.private.private_learning import noisy_statistics

        if self._shard.load_in is not None:
            why = "it proposes a schema, which tells of its rows: give it the schema of the operator (--schema FILE)"
            raise UpdateRefused(why)
        try:
            layout = from_json(question.noisy_json, NoisyLayout)
            sums = noisy_statistics(self._shard.load(), layout, self._options, plan, self._shard.digest)
        except msgspec.DecodeError as error:
            raise UpdateRefused(f"the question cannot be read ({error}): update one of the two") from None
        except (SettingError, BudgetSpent) as error:
            raise UpdateRefused(str(error)) from None
        except HomeMismatch as error:
            self._say(f"gives no statistics: {error}")
            raise UpdateRefused("its privacy ledger cannot be used; its own log says why") from None
        return msgspec.json.encode(sums)


def _moments(shard: LazyShard, plan: Plan) -> tuple[float, ...]:
    """Return the description of the training inputs (common.models.feature_mean); empty if the model has none."""
    import torch

    from attune.common.models.feature_mean import description_size, moments
    from attune.common.models.registry import build
    from attune.fedclient.data.prepare import prepare
    from attune.fedclient.work.objectives.base import Network

    network = Network(build(plan.model, plan.seed))
    if not description_size(network.model):
        return ()
    network.model.eval()
    batches = torch.split(prepare(shard.load_for(plan), plan).train_x, DESCRIBED_AT_ONCE)
    try:
        return tuple(moments(batches, lambda x: network.with_features({}, x)[1]))
    except SettingError:  # a model that computes its logits without calling its head
        return ()
