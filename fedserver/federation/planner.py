"""Making of the plan: what the connected devices' data have in common, and who of them does not fit it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from attune.common.errors import AttuneError, SettingError, ShapeMismatch, UpdateRefused
from attune.common.exchange.messages import Notice, Welcome
from attune.common.faults import SERVER, fail_at
from attune.common.plan import LIGHT, Plan, Profile
from attune.common.protocol import LOCAL_SCALE
from attune.common.schema import Schema
from attune.common.text import clean, listed
from attune.fedserver.core import data_form, planning
from attune.fedserver.core import scale as scales
from attune.fedserver.core.advice import for_devices
from attune.fedserver.core.ballot import classes_apart, united
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.core.table_schemas import telling
from attune.fedserver.federation.federation_state import FederationState
from attune.fedserver.federation.survey import Survey
from attune.fedserver.lab.given import read_given

LOG = logging.getLogger("fedserver")
PLANNING = "making the plan"  # the name of a trouble
Known = Callable[[Collection[str]], Awaitable[Iterable[DeviceRecord]]]
RefuseDevice = Callable[[str, AttuneError], Awaitable[None]]


class Planner:
    """Maker of the plan, once enough devices are connected whose data fit together.

    Args:
        state: The federation.
        name: Its name, as in the plan.
        fewest: Devices whose statistics are combined for others.
        survey: The survey, by whose masked sum data may be scaled.

    Attributes:
        planless: Done once no plan could be made; why.
        profiles: The devices for which this process made the plan.
        variants: The variant of the model that each device has, once it has connected under a plan with variants.
    """

    def __init__(self, state: FederationState, name: str, fewest: int, survey: Survey) -> None:
        self._state, self._name, self._fewest, self._survey = state, name, fewest, survey
        self._settings, self._streams = state.settings, state.streams
        self.planless: asyncio.Future[AttuneError] = asyncio.get_running_loop().create_future()
        self.profiles: Mapping[str, Profile] = {}
        self.variants: dict[str, str] = {}
        self._common = scales.Scales()  # by a masked sum
        self._summing, self._summed = False, False  # whether statistics for common scales are being summed, or were

    async def planned(self, known: Known, refuse: RefuseDevice, again: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Return whether there is a plan now, of the data of the connected devices.

        Args:
            known: Returns the rows of devices.
            refuse: Refuses a device whose data differ from the majority's.
            again: Comes here again, in a turn, once statistics are summed.
        """
        if len(self._streams) < self._settings.round.min_clients:
            return False
        declared = self._streams.profiles()
        tokens = {device.name: device.token for device in await known(declared)}
        swollen = {} if self._settings.data.schema else data_form.too_many_features(declared, tokens)
        usual = {name: profile for name, profile in declared.items() if name not in swollen}
        try:
            profiles, outside = await asyncio.to_thread(united, usual, self._settings.data.schema, tokens)
        except SettingError as conflict:
            self._cannot_begin(conflict)
            return False
        agreement = data_form.agree(profiles, tokens, self._settings.data)
        proposals = {name: profile.proposal for name, profile in usual.items() if isinstance(profile.proposal, Schema)}
        schema = next((profile.schema for profile in profiles.values() if isinstance(profile.schema, Schema)), None)
        for name, texts in (telling(schema, proposals) if schema is not None else {}).items():
            if texts:
                LOG.warning("%s: %s", name, listed(texts, data_form.NAMED), extra={"device": name})
        apart = classes_apart({name: list(map(str, profile.labels)) for name, profile in agreement.agreed.items()})
        for why in filter(None, (data_form.one_token(tokens), apart)):
            LOG.warning("%s", why)
        if agreement.tie:
            self._cannot_begin(ShapeMismatch(agreement.tie))
            return False
        greedy = {} if self._settings.data.classes else data_form.too_many_classes(agreement.agreed, tokens)
        greedy |= {} if self._settings.data.vocabulary else data_form.too_many_tokens(agreement.agreed, tokens)
        unable = self._unable(agreement.agreed)
        for name, error in {**swollen, **outside, **agreement.odd, **greedy, **unable}.items():
            await refuse(name, error)
        agreed = {name: profile for name, profile in agreement.agreed.items() if name not in {*greedy, *unable}}
        if len(agreed) < self._settings.round.min_clients or self._summing:
            return False
        # Of devices whose channels are those of the plan: all fill one number with theirs, in their order.
        alike = {name: profiles[name] for name, of in agreed.items() if profiles[name].column_names == of.column_names}
        if not self._summed and self._survey.wanting(alike):
            self._summing = True
            self._state.turns.start(self._sum_statistics(alike, again))
            return False
        return await self._try_plan(agreed)

    async def _sum_statistics(self, agreed: Mapping[str, Profile], again: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Sum masked statistics for common scales, beside the turns, and go on to the plan."""
        scale = partial(self._survey.scale, agreed)
        try:
            self._common = await self._state.troubles.overcome("summing statistics", scale)
        except (UpdateRefused, SettingError) as refusal:
            LOG.warning("each device standardises by its own statistics, since there is no masked sum of them: %s", refusal)
        self._summing, self._summed = False, True
        self._state.turns.start(self._state.turns.step(again))

    def _unable(self, profiles: Mapping[str, Profile]) -> dict[str, AttuneError]:
        """Return an error for each device that relies on common statistics, if these devices disclose too few."""
        common = scales.scales_of(profiles, self._fewest)
        errors: dict[str, AttuneError] = {}
        for name, profile in profiles.items():
            try:
                scales.check_ability(profile, name, self._streams.can(name, LOCAL_SCALE), common)
            except SettingError as error:
                errors[name] = error
        return errors

    async def _try_plan(self, profiles: Mapping[str, Profile]) -> bool:
        """Make a plan, and return whether there is one now. Data that fit no model do not end the server; missing code does."""
        try:
            await self._make_plan(profiles)
        except AttuneError as error:
            if isinstance(error.__cause__, ImportError):
                raise
            self._cannot_begin(error)
            return False
        self._state.troubles.clear(PLANNING)
        return True

    def _cannot_begin(self, error: AttuneError) -> None:
        """Tell the connected devices that no plan can be made of their data, and wait for other devices."""
        self._state.troubles.set(PLANNING, str(error))
        for name in self._streams.profiles():
            self._streams.send(name, Notice(clean(f"the server cannot begin: {for_devices(error)}")))
        if not self.planless.done():
            self.planless.set_result(error)

    async def _make_plan(self, profiles: Mapping[str, Profile]) -> None:
        """Fix the plan, make the state before round 1 durable, and tell all waiting devices."""
        state, settings, overcome = self._state, self._state.settings, self._state.troubles.overcome
        ability, common = planning.sums_ability(settings), self._common
        sums = [name for name in profiles if state.streams.can(name, ability)]
        plan = planning.make_plan(settings, profiles, self._name, state.run, self._fewest, common, sums)
        if settings.round.given is not None:
            given = await state.executors.disk(read_given, state.storage.blobs, settings.round.given)
            plan = given.planned(msgspec.structs.replace(plan, given=settings.round.given, matrix=settings.round.matrix))
        started = await overcome("making the first state", partial(state.lab.start, plan, [], 0))
        plan = planning.pinned(plan, started.body_digest)
        commit = partial(state.storage.ledger.commit_round, state.round.record, started.slots, [], {}, plan)
        await overcome("writing the plan", commit)
        fail_at(SERVER, 0, "plan-committed")
        await state.lab.settle()
        await self.vary(plan, profiles)
        state.plan, state.max_bytes, self.profiles = plan, started.max_bytes, profiles
        LOG.info("plan: %s with a %s, %d classes, %d devices", plan.method, plan.model.name, len(plan.classes), len(profiles))
        for line in planning.notes_on(plan, settings):
            LOG.info("%s", line)
        groups = [plan.group_of(profile.variant) for profile in profiles.values()]
        fewest_alike = min(Counter(group for group in groups if group != LIGHT).values(), default=0)
        for why in settings.what_liars_can(fewest_alike) if self._fewest > 1 else ():
            LOG.warning("%s", why)
        for name in profiles:
            state.streams.send(name, self.welcome(plan))

    async def vary(self, plan: Plan, profiles: Mapping[str, Profile]) -> None:
        """Fix the variant of the model that devices have in this run, if the plan has variants, or a device has no network."""
        groups = {name: plan.group_of(profile.variant) for name, profile in profiles.items()}
        chosen = {name: group for name, group in groups.items() if plan.variants or group}
        if new := {name: variant for name, variant in chosen.items() if name not in self.variants}:
            write = partial(self._state.storage.ledger.note_variants, new)
            await self._state.troubles.overcome("writing the devices' variants", write)
            await self._state.lab.vary(new)
            self.variants |= new

    def welcome(self, plan: Plan) -> Welcome:
        """Return what a device is told first."""
        return Welcome(msgspec.json.encode(plan), self._settings.server.inline_bytes, True)
