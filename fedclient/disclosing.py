"""Statistics of a device's data on their way to the server: only with `--disclose statistics`, and never beside privacy."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from attune.common.errors import WireError
from attune.common.exchange.messages import StatisticsReport, StatisticsRequest, UnitReport
from attune.common.exchange.registry import secure_sum_in
from attune.common.plan import Plan, Profile
from attune.common.site_statistics import MOST_COLUMNS, Centre
from attune.common.text import from_json
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.site_sums import site_sketches, site_sums
from attune.fedclient.data.units import units_of_shard
from attune.fedclient.link.port import Link
from attune.fedclient.options import DeviceOptions
from attune.fedclient.work.worker import Worker

MOST_BYTES = 3 << 20  # of a report; a message of gRPC may have 4 MiB


def told_profile(options: DeviceOptions, profile: Profile) -> Profile:
    """Return what the server is told of the shard: sums of its values only if the device discloses statistics."""
    return profile if "statistics" in options.disclose else msgspec.structs.replace(profile, columns=None, targets=None)


async def tell_units(
    options: DeviceOptions, shard: LazyShard, plan: Plan, link: Link, worker: Worker, say: Callable[[str], None]
) -> None:
    """Tell the server, and the person at the device, by a word how columns fit the ranges of the plan's schema.

    Nothing is told if there are no ranges, if training has noise, or if the owner forbids it.
    """
    if plan.schema is None or plan.is_private or plan.noisy_sums is not None or options.units == "none":
        return
    if all(column.range is None for column in plan.schema.columns.values()):
        return
    verdicts = await worker.do(lambda: units_of_shard(shard.load_for(plan)))
    link.answer(UnitReport(dict(verdicts)))
    for column, verdict in verdicts.items():
        if verdict != "fits":
            say(f"warning: {column} does not fit the schema's range ({verdict}): is its unit the schema's?")


class Discloser:
    """Answers of one device to questions for statistics, one at a time: a question that comes meanwhile is dropped."""

    def __init__(self, options: DeviceOptions, shard: LazyShard, link: Link, worker: Worker) -> None:
        self._options, self._shard, self._link, self._worker = options, shard, link, worker
        self._busy = False

    async def answer(self, question: StatisticsRequest, plan: Plan | None) -> None:
        """Answer a question, or say why not."""
        if self._busy:
            return
        self._busy = True
        try:
            why = self._objection(plan)
            report = (
                StatisticsReport(question.id, refused=why) if why else await self._worker.do(_report, self._shard, question)
            )
            self._link.answer(report)
        finally:
            self._busy = False

    def _objection(self, plan: Plan | None) -> str:
        """Return why this device gives no statistics; empty if it does. A server may ask although its plan has privacy."""
        if "statistics" not in self._options.disclose:
            return "it discloses no statistics (fedclient --disclose statistics)"
        noisy = plan is not None and (plan.is_private or plan.noisy_sums is not None)
        if noisy or self._options.privacy.epsilon is not None:
            return "its data leave only with noise (privacy.unit, --max-epsilon), and statistics have none"
        if plan is not None and secure_sum_in(plan.transforms) is not None:
            return "its sums leave only masked (privacy.secure_aggregation), and statistics are not"
        return ""


def _report(shard: LazyShard, question: StatisticsRequest) -> StatisticsReport:
    try:
        centres = from_json(question.centres_json, dict[str, Centre]) if question.centres_json else {}
    except msgspec.DecodeError as error:
        raise WireError(f"the server's question for statistics cannot be read ({error}): update one of the two") from None
    if len(centres) > MOST_COLUMNS or len(question.columns) > MOST_COLUMNS:
        return StatisticsReport(question.id, refused=f"the question is for more than {MOST_COLUMNS} columns")
    whole = shard.load()
    answer = site_sketches(whole, centres) if question.centres_json else site_sums(whole, question.columns)
    if len(answer.columns) > MOST_COLUMNS:
        return StatisticsReport(
            question.id,
            refused=f"its data have {len(answer.columns)} columns: ask for at most {MOST_COLUMNS} of them (--columns)",
        )
    text = msgspec.json.encode(answer)
    if len(text) > MOST_BYTES:
        return StatisticsReport(question.id, refused=f"its answer has {len(text):,} bytes: ask for fewer columns (--columns)")
    return StatisticsReport(question.id, text)
