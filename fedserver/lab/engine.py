"""All tensor work of the server. Jobs run one after the other, so no lock is needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

import msgspec
from msgspec.structs import replace

from attune.common.exchange.registry import growth_of, settings_of
from attune.common.exchange.transform import ArrivalContext, Cohort, NotASum, PartUpdate, RoundContext, is_sealed
from attune.common.faults import SERVER, fail_at
from attune.common.methods.method import SOLVED, PartKind
from attune.common.methods.ridge import GRAM
from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.common.wire.files import OpenFiles, TensorFile, TensorWriter
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.tensors import Cast, TensorSource, read_through
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.collector import Unmasking
from attune.fedserver.core.records import AcceptedUpdate, Slot, Smaller
from attune.fedserver.lab.checks import weighed
from attune.fedserver.lab.given import tensors_of_given
from attune.fedserver.lab.groups import Group, make_again, models_of, noise_of, stage_another, stage_earlier
from attune.fedserver.lab.served_values import ServedValues
from attune.fedserver.lab.vault import ByVariant, Norms, NotFinite, StateRecipe, StateVault, earlier_slots, kept_slots
from attune.fedserver.ports.blobs import STATE, Blobs, blob_of
from attune.fedserver.ports.lab import NO_VARIANTS, Arrived, RoundOutcome, Served

HEADER_SLACK_BYTES = 1 << 16  # another writer's safetensors header may be longer than ours


class _Closing(msgspec.Struct):
    """Round that is being closed.

    Attributes:
        norms: Norms of changes by part, with those of the staged state.
        unmasking: Secrets that take the masks off its sum.
        bounded: Devices whose change was bounded, each with its norm in medians.
        without_vote: Those of them that did not count in some part.
    """

    norms: dict[str, dict[str, float]]
    unmasking: Unmasking | None = None
    bounded: dict[str, float] = {}
    without_vote: set[str] = set()


class Engine:
    """Tensor work of one federation on the server: its aggregators, over the vaults that keep their state.

    Args:
        plan: The plan of the federation.
        slots: The durable state; empty for a new federation.
        blobs: The store of state and of updates.
        closed: The number of rounds that the state has taken in.
        area: The first part of the names of the state's blobs.
        served: The store of values that are made to be served; None: `blobs`.
        variants: The variant of the model that clients have, as for `vary`.

    Attributes:
        groups: The parts of each variant, by name.
        body_digest: Digest of the model's frozen body; empty: it has none.
        told: Descriptions of devices.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        blobs: Blobs,
        closed: int,
        area: str = STATE,
        served: Blobs | None = None,
        variants: Mapping[str, str] = NO_VARIANTS,
    ) -> None:
        self._plan, self._blobs, self._closed = plan, blobs, closed
        self._served = ServedValues(blobs, served or blobs)
        start = tensors_of_given(blobs, plan.given) if plan.given and not slots else None
        vaults: dict[str, StateVault] = {}

        def vault_for(name: str) -> StateVault:
            return vaults.setdefault(name, StateVault(blobs, name, slots, closed + 1 if slots else 0, area))

        self._models = models_of(plan, vault_for, start)
        self.body_digest, self.told = self._models[0].body_digest, self._models[0].told
        self._noise = noise_of(plan, blobs, len(self._models[0].parts))
        self.groups = ByVariant((item for model in self._models for item in model.groups(self._noise)), variants)
        self._norms: Norms = {}  # of the changes in earlier rounds
        self._admitted: dict[str, bool] = {}  # since the present state became true: client -> whether it is a founder
        self._recipes: list[StateRecipe] = []  # of the present state and of those before it, the newest first
        self._next_recipe: StateRecipe | None = None  # of the staged one
        self._closing: _Closing | None = None  # the round that was aggregated, perhaps in part, without a commit
        for group in self.groups:
            if not slots:
                group.aggregator.start(group.initial)

    @property
    def manifests(self) -> dict[PartKind, Manifest]:
        """Tensors that devices with the plan's own model hand in, by part."""
        return {group.part: group.manifest for name, group in self.groups.by_name.items() if name == group.part}

    def vary(self, variants: Mapping[str, str]) -> None:
        """Note the variant of the model that clients have; those without one have the plan's model."""
        self.groups.variants.update(variants)

    def max_bytes(self) -> dict[str, int]:
        """Return for each part that devices hand in, in a fixed order, the largest blob that can be an answer."""
        transforms, sizes = settings_of(self._plan.transforms), dict[str, float]()
        for group in self.groups:
            size = layout_of(group.manifest).size * growth_of(group.part, transforms)
            sizes[group.part] = max(size, sizes.get(group.part, 0))
        return {part: math.ceil(size) + HEADER_SLACK_BYTES for part, size in sizes.items()}

    def serve(self, clients: Sequence[str], founders: Collection[str] = (), solved: bool = True) -> Served:
        """Return for each client and part what it is served now: common blobs, its own slot, or generated weights.

        `founders` enrolled before the first round was closed. With `solved` the closed form that joins blends is served, too.
        """
        served: Served = {client: {} for client in clients}
        self._admit({client: client in founders for client in clients})
        for _, group, members in self.groups.members(clients, solved):
            part, slots = group.part, {client: group.aggregator.slot(client) for client in members}
            whole = {slot: self._whole(group, slot) for slot in {slot: None for slot in slots.values() if slot is not None}}
            without = [client for client in sorted(members) if slots[client] is None]
            self._served.generate(part, group.aggregator, without, self._closed)
            for client, slot in slots.items():
                served[client][part] = self._served.generated[part, client] if slot is None else whole[slot]
        return served

    def serve_again(self, clients: Sequence[str], founders: Collection[str], solved: bool, version: int) -> Served:
        """Return what clients were served of an earlier state; of the present one if that state is not known any more."""
        slots, refused = earlier_slots(self.slots(), self._recipes, self._closed, version, self._blobs)
        if refused:
            return self.serve(clients, founders, solved)
        earlier = Engine(self._plan, slots, self._blobs, version, served=self._served.store, variants=self.groups.variants)
        earlier.told.take(self.told.by_client)
        served = earlier.serve(clients, founders, solved)
        self._served.lend(earlier._served)
        return served

    def _whole(self, group: Group, slot: str) -> Blob:
        """Return a slot's blob, which is checked at the first time in a process; Damaged if its bytes are other ones."""
        blob = group.vault.blob(slot)
        self._blobs.open(blob).close()
        return blob

    def _admit(self, clients: Mapping[str, bool]) -> None:
        """Add these clients (client -> whether it is a founder); this may be repeated."""
        for _, group, members in self.groups.members(sorted(clients)):
            for client in members:
                group.aggregator.admit(client, clients[client])
        self._admitted.update(clients)

    def cold_start(self, clients: Sequence[str]) -> Served:
        """Return for each client and part what an unknown device is served. Devices compare their own model with it."""
        served, made = Served({client: {} for client in clients}), self._served.cold_start
        for name, group, members in self.groups.members(clients, solved=False):
            if members and name not in made:
                tensors = group.aggregator.cold_start()
                made[name] = self._whole(group, tensors) if isinstance(tensors, str) else self._served.write(name, tensors)
            others = {one: self._whole(group, slot) for one, slot in group.handed_in.items()} if self._plan.matrix else {}
            for client in members:
                theirs = {f"{group.part}/{one}": blob for one, blob in others.items() if one != client}
                served[client] |= {group.part: made[name], **theirs}
        return served

    def pack(self, blobs: Iterable[Blob]) -> dict[str, Blob]:
        """Return the smaller lossless form of served blobs, by digest, where there is one."""
        return self._served.packing.whole(blobs)

    def changes(self, clients: Sequence[str], parts: Sequence[PartKind]) -> dict[str, Smaller]:
        """Return deltas of served values, as the port."""
        return self._served.changes(
            (group, members) for _, group, members in self.groups.members(clients) if group.part in parts
        )

    def arrive(
        self, client: str, part: PartKind, blob: Blob, encoding: str = "", served: bool = True, max_norm: float = 0.0
    ) -> Arrived:
        """Decode an update and check it in one pass over its tensors, as the port."""
        who, group = f"{client}'s {part} update", self.groups.of(client, part)
        with OpenFiles() as files:
            file, before = self._opened(blob, files), self._base(client, part, files)
            context = ArrivalContext(client, part, who, encoding, group.manifest, before, served, max_norm)
            tensors = group.chain.on_arrival(PartUpdate(client, 0.0, file), context).tensors
            values = tensors.opened(tensors.by) if is_sealed(tensors) else cast(TensorSource, tensors)
            if values.stored:
                if values is tensors:
                    read_through(values)
                context.end()
                return Arrived(blob, context.facts)
            create = partial(self._blobs.create, f"{blob.name}.{encoding or 'values'}", durable=False)
            with TensorWriter(create, values.manifest) as writer:
                for name in writer.layout.manifest:
                    writer.put(name, values[name])
                context.end()
                return Arrived(writer.close(), context.facts)

    def _base(self, client: str, part: PartKind, files: OpenFiles) -> TensorFile | None:
        """Return a client's values of a part before its training; None if it hands in their delta."""
        group = self.groups.of(client, part)
        values = group.settings.returns == "values" and part != SOLVED and not self._is_rebased(group)
        slot = group.aggregator.slot(client) if values else None
        return self._opened(group.vault.blob(slot), files) if slot else None

    def _is_rebased(self, group: Group) -> bool:
        """Return whether devices hand in changes, maybe from an older state, where the aggregator takes values."""
        return group.settings.returns == "values" and self._plan.returns.get(group.part) == "change"

    def aggregate(
        self,
        entries: Mapping[str, AcceptedUpdate],
        founders: Collection[str] = (),
        adaptation: AdaptationSpec | None = None,
        unmasking: Unmasking | None = None,
    ) -> RoundOutcome:
        """Aggregate accepted updates into the next state, staged in the vaults, with the recipe that made it; as the port."""
        closing = self._take_back(unmasking)
        try:
            metrics = self._close(closing, entries, adaptation, founders)
        except (NotFinite, NotASum) as error:
            self._note_recipe(self._take_back(), None, {}, [])
            return RoundOutcome({}, [], closing.bounded, sorted(closing.without_vote), str(error))
        slots = self.staged_slots()
        self._note_recipe(closing, adaptation, entries, slots)
        return RoundOutcome(metrics, slots, closing.bounded, sorted(closing.without_vote))

    def follow(self, recipe: StateRecipe) -> list[Slot]:
        """Stage again what `aggregate` once staged."""
        self._norms = recipe.norms_before
        self._admitted.update({client: client in recipe.founders for client in recipe.admitted})
        self.told.take(recipe.descriptions)
        self._close(self._take_back(recipe.unmasking), recipe.entries, recipe.adaptation, recipe.founders)
        return self.staged_slots()

    def go_back(self, to: int) -> RoundOutcome:
        """Stage the state after the round `to` as the next one, as the port."""
        closing, present = self._take_back(), self.slots()
        slots, refused = earlier_slots(present, self._recipes, self._closed, to, self._blobs)
        stage_earlier({name: group.vault for name, group in self.groups.by_name.items()}, present, slots)
        return self._unaggregated(closing, refused)

    def another_start(self) -> RoundOutcome:
        """Stage a state near the present one as the next one, as the port."""
        closing = self._take_back()
        stage_another(self.groups.by_name, self._plan.seed, self._closed)
        return self._unaggregated(closing)

    def _unaggregated(self, closing: _Closing, refused: str = "") -> RoundOutcome:
        """Return the outcome of a state that was staged without an aggregator."""
        make_again(self.groups.by_name, self._models)
        self._note_recipe(closing, None, {}, [])
        return RoundOutcome({}, self.staged_slots(), refused=refused)

    def slots(self) -> list[Slot]:
        """Return the slots of the present state."""
        return [slot for group in self.groups for slot in group.vault.slots()]

    def _note_recipe(
        self,
        closing: _Closing,
        adaptation: AdaptationSpec | None,
        entries: Mapping[str, AcceptedUpdate],
        made: Sequence[Slot],
    ) -> None:
        """Note how the staged state was made; for one that no aggregator made, only what it replaces."""
        replaced = [slot for group in self.groups for slot in group.vault.replaced_slots()]
        admitted, founding = sorted(self._admitted), sorted(name for name, founder in self._admitted.items() if founder)
        norms, secrets = (self._norms, closing.norms), closing.unmasking if entries else None
        said = {client: self.told.by_client[client] for client in admitted if client in self.told.by_client}
        self._next_recipe = StateRecipe(
            self._closed + 1, adaptation, admitted, dict(entries), replaced, made, founding, *norms, secrets, said
        )
        self._blobs.put(self._next_recipe.name, msgspec.json.encode(self._next_recipe))
        fail_at(SERVER, self._next_recipe.round, "aggregated")

    def _close(
        self,
        closing: _Closing,
        entries: Mapping[str, AcceptedUpdate],
        adaptation: AdaptationSpec | None,
        founders: Collection[str],
    ) -> dict[str, float]:
        votes = adaptation is None or adaptation.common  # if only newcomers' own values are fitted, no update can harm others
        # An earlier try or another process may have admitted clients. The next state and its recipe must have all of them.
        self._admit(self._admitted | {client: client in founders for client in entries})
        metrics: dict[str, float] = {}
        for name, group, members in self.groups.members(entries):
            if adaptation is not None and group.part not in adaptation.returns:
                continue
            with OpenFiles() as files:
                theirs = {client: entries[client] for client in members if group.part in entries[client].parts}
                cohort = self._cohort(closing, name, group, theirs, votes, files)
                if group.chain.sealed_by:
                    metrics |= {key: value for update in cohort.updates for key, value in update.facts.items()}
                numbers = group.aggregator.close_round(cohort.updates) if votes else group.aggregator.fit(cohort.updates)
                if cohort.unheard and group.settings.embeddings == "trained":
                    group.aggregator.fit(cohort.unheard)  # so one that joins late gets near the others and has a vote again
                metrics |= {f"{name}.{key}": value for key, value in numbers.items()}
        return metrics

    def _cohort(
        self,
        closing: _Closing,
        name: str,
        group: Group,
        entries: Mapping[str, AcceptedUpdate],
        votes: bool,
        files: OpenFiles,
    ) -> Cohort:
        """Return a cohort's updates of a group as its aggregator gets them."""
        part, norms = group.part, closing.norms.setdefault(name, {})
        base = partial(self._base, part=part, files=files)
        context = RoundContext(part, self._closed + 1, base, votes, closing.bounded, norms=norms, unmasking=closing.unmasking)
        context.manifest, context.inputs = group.manifest, self._inputs(group, entries)
        context.attempt = max((entry.attempt for entry in entries.values()), default=0)
        cohort = Cohort(part, tuple(self._update(group, client, entry, files) for client, entry in sorted(entries.items())))
        cohort = group.chain.on_cohort(cohort, context)
        closing.without_vote |= context.without_vote
        slot = group.aggregator.slot("") if self._is_rebased(group) else None
        present = None if slot is None else self._opened(group.vault.blob(slot), files)
        fresh = {client: entry.fresh for client, entry in entries.items()}  # a sum of updates has no name
        returns = group.settings.returns
        heard = [weighed(update, fresh.get(update.client, 1.0), returns, present) for update in cohort.updates]
        return replace(cohort, updates=tuple(heard))

    def _inputs(self, group: Group, entries: Mapping[str, AcceptedUpdate]) -> tuple[str, ...]:
        """Return the digests of what a part's next value follows from, for a value that all clients share."""
        slot = group.aggregator.slot("")
        if self._noise is None or slot is None:
            return ()
        handed_in = (entry.parts[group.part].digest for entry in entries.values())
        return tuple(sorted([group.vault.blob(slot).digest, *handed_in]))

    def _update(self, group: Group, client: str, entry: AcceptedUpdate, files: OpenFiles) -> PartUpdate:
        file, sealed_by = self._opened(entry.parts[group.part], files), group.chain.sealed_by
        values = file if sealed_by else Cast(file, group.manifest)
        # Networks train on fewer samples than sums are over.
        samples = values[GRAM][-1] if group.part == SOLVED and not sealed_by else entry.row.samples or 0
        update = PartUpdate(client, float(samples), values, facts=entry.facts.get(group.part, {}))
        return update.sealed(sealed_by) if sealed_by else update

    def _take_back(self, unmasking: Unmasking | None = None) -> _Closing:
        """Forget what was staged and not committed, as a restart does: the round is closed again from the durable state."""
        if self._closing is not None:
            for group in self.groups:
                group.vault.take_back()
            make_again(self.groups.by_name, self._models)
            self._next_recipe = None
        self._closing = _Closing({part: dict(norms) for part, norms in self._norms.items()}, unmasking)
        return self._closing

    def _opened(self, blob: Blob, files: OpenFiles) -> TensorFile:
        file = TensorFile(self._blobs.open(blob))
        files.append(file)
        return file

    def staged_slots(self) -> list[Slot]:
        return [slot for group in self.groups for slot in group.vault.staged_slots()]

    def remember(self, recipes: Sequence[StateRecipe]) -> None:
        """Note at the start how the present state and those before it were made, the newest first."""
        self._recipes = list(recipes)
        if recipes:
            self._norms = recipes[0].norms
        for group in self.groups:
            group.vault.remember(recipes[0].replaced if recipes else ())

    def settle(self, holders: Collection[str] = ()) -> None:
        """Make the staged state the state, after the commit. What was generated from the old one is removed.

        If deltas are served, devices still hold the old values: then they stay until the next commit; those of `holders` stay.
        """
        for group in self.groups:
            group.vault.settle()
        if self._next_recipe is not None:
            self._closed, self._norms = self._next_recipe.round, self._next_recipe.norms
            self._recipes, self._next_recipe = [self._next_recipe, *self._recipes], None
        self._closing = None
        self._served.settle(holders)
        self._admitted = {}

    def forget(self, oldest: int) -> None:
        """Remove the recipes that lead back beyond the state after the round `oldest`, and their blobs, as the port.

        Open readers keep their blobs. The oldest recipe is removed first: the others still lead back one from the other.
        """
        last = min(oldest, self._closed - 1)
        if not (dropped := [recipe for recipe in self._recipes if recipe.round <= last]):
            return
        self._recipes = [recipe for recipe in self._recipes if recipe.round > last]
        kept = {slot.file for slot in kept_slots(self.slots(), self._recipes)}
        self._blobs.remove([recipe.name for recipe in reversed(dropped)])
        self._blobs.remove([blob_of(slot).name for slot in kept_slots((), dropped) if slot.file not in kept])
