"""All tensor work of the server. Jobs run one after the other, so no lock is needed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast, get_args

import msgspec
from msgspec.structs import replace

from attune.common.exchange.registry import growth_of, settings_of
from attune.common.exchange.transform import ArrivalContext, Cohort, NotASum, PartUpdate, RoundContext, is_sealed
from attune.common.faults import SERVER, fail_at
from attune.common.methods.hypernetwork import travelling
from attune.common.methods.method import SOLVED, PartKind, assign
from attune.common.methods.registry import configured_in
from attune.common.methods.ridge import GRAM, nothing_served
from attune.common.models.body import body_of, forget
from attune.common.models.registry import build
from attune.common.models.structure import components_by_part, tensors_of
from attune.common.plan import Plan
from attune.common.wire.blobs import Blob
from attune.common.wire.files import TensorFile, TensorWriter
from attune.common.wire.header import Manifest, layout_of
from attune.common.wire.tensors import Cast, TensorSource, read_through
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.collector import Unmasking
from attune.fedserver.core.records import AcceptedUpdate, Slot, Smaller
from attune.fedserver.lab.aggregators.base import Aggregator
from attune.fedserver.lab.aggregators.described import ToldDescriptions
from attune.fedserver.lab.build import Maker, aggregators_for, made
from attune.fedserver.lab.chains import chain_of, noise_of
from attune.fedserver.lab.checks import weighed
from attune.fedserver.lab.given import tensors_of_given
from attune.fedserver.lab.served_values import ServedValues
from attune.fedserver.lab.unaggregated import stage_another, stage_earlier
from attune.fedserver.lab.vault import Norms, NotFinite, StateRecipe, StateVault, earlier_slots, kept_slots
from attune.fedserver.ports.blobs import STATE, Blobs, blob_of
from attune.fedserver.ports.lab import Arrived, RoundOutcome, Served

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
        make: The function that makes an aggregator.
    """

    def __init__(
        self,
        plan: Plan,
        slots: Sequence[Slot],
        blobs: Blobs,
        closed: int,
        area: str = STATE,
        served: Blobs | None = None,
        make: Maker = made,
    ) -> None:
        self._plan, self._blobs, self._closed = plan, blobs, closed
        self._served = ServedValues(blobs, served or blobs)
        model = build(plan.model, plan.seed)
        body = body_of(model)
        self.body_digest = body.digest if body else ""
        self.told = ToldDescriptions(model, make)
        forget(model)
        configured = configured_in(plan)
        assignment = assign(configured.method, model)
        by_part = components_by_part(model, assignment)
        kinds = {*assignment.values(), *([SOLVED] if plan.closed_form else [])}
        parts: list[PartKind] = [kind for kind in get_args(PartKind) if kind != "private" and kind in kinds]
        self._vaults = {part: StateVault(blobs, part, slots, closed + 1 if slots else 0, area) for part in parts}
        # Aggregators are made again when a staged state is dropped, because they hold a part of it.
        self._make = partial(aggregators_for, configured, model, self._vaults.__getitem__, plan.seed, self.told.make)
        self._aggregators: dict[PartKind, Aggregator] = self._make()
        self._settings = configured.aggregators
        transforms = settings_of(plan.transforms)
        self._noise = noise_of(plan, blobs, len(self._aggregators))
        start = tensors_of_given(blobs, plan.given) if plan.given and not slots else tensors_of(model)
        of = {part: {name: value for name, value in start.items() if assignment[name] == part} for part in parts}
        initial = of | ({SOLVED: nothing_served(plan)} if plan.closed_form else {})
        self._chains = {
            part: chain_of(part, self._settings[part], transforms, self._noise, plan.task, initial[part], self._vaults[part])
            for part in parts
        }
        self._norms: Norms = {}  # of the changes in earlier rounds
        self._admitted: dict[str, bool] = {}  # since the present state became true: client -> whether it is a founder
        self._recipes: list[StateRecipe] = []  # of the present state and of those before it, the newest first
        self._next_recipe: StateRecipe | None = None  # of the staged one
        self._closing: _Closing | None = None  # the round that was aggregated, perhaps in part, without a commit
        self.manifests: dict[PartKind, Manifest] = {}
        for part, aggregator in self._aggregators.items():
            self.manifests[part] = travelling(self._settings[part], initial[part], by_part.get(part, {}))
            if not slots:
                aggregator.start(initial[part])

    def max_bytes(self) -> dict[str, int]:
        """Return for each part that devices hand in, in a fixed order, the largest blob that can be an answer."""
        transforms, manifests = settings_of(self._plan.transforms), sorted(self.manifests.items())
        sizes = {part: layout_of(manifest).size * growth_of(part, transforms) for part, manifest in manifests}
        return {part: math.ceil(size) + HEADER_SLACK_BYTES for part, size in sizes.items()}

    def serve(self, clients: Sequence[str], founders: Collection[str] = (), solved: bool = True) -> Served:
        """Return for each client and part what it is served now: common blobs, its own slot, or generated weights.

        `founders` enrolled before the first round was closed. With `solved` the closed form that joins blends is served, too.
        """
        served: Served = {client: {} for client in clients}
        self._admit({client: client in founders for client in clients})
        for part, aggregator in self._by_name(solved):
            slots = {client: aggregator.slot(client) for client in clients}
            whole = {slot: self._whole(part, slot) for slot in {slot: None for slot in slots.values() if slot is not None}}
            without = [client for client in sorted(clients) if slots[client] is None]
            self._served.generate(part, aggregator, without, self._closed)
            for client, slot in slots.items():
                served[client][part] = self._served.generated[part, client] if slot is None else whole[slot]
        return served

    def _by_name(self, solved: bool = True) -> list[tuple[PartKind, Aggregator]]:
        return [item for item in sorted(self._aggregators.items()) if solved or item[0] != SOLVED]

    def serve_again(self, clients: Sequence[str], founders: Collection[str], solved: bool, version: int) -> Served:
        """Return what clients were served of an earlier state; of the present one if that state is not known any more."""
        slots, refused = earlier_slots(self._slots(), self._recipes, self._closed, version, self._blobs)
        if refused:
            return self.serve(clients, founders, solved)
        earlier = Engine(self._plan, slots, self._blobs, version, served=self._served.store)
        earlier.told.take(self.told.by_client)
        served = earlier.serve(clients, founders, solved)
        self._served.lend(earlier._served)
        return served

    def _whole(self, part: PartKind, slot: str) -> Blob:
        """Return a slot's blob, which is checked at the first time in a process; Damaged if its bytes are other ones."""
        blob = self._vaults[part].blob(slot)
        self._blobs.open(blob).close()
        return blob

    def _admit(self, clients: Mapping[str, bool]) -> None:
        """Add these clients (client -> whether it is a founder); this may be repeated."""
        for _, aggregator in self._by_name():
            for client, founder in sorted(clients.items()):
                aggregator.admit(client, founder)
        self._admitted.update(clients)

    def cold_start(self) -> dict[str, Blob]:
        """Return for each part what an unknown device is served. Devices compare their own model with it."""
        for part, aggregator in self._by_name(solved=False):
            if part not in self._served.cold_start:
                tensors = aggregator.cold_start()
                self._served.cold_start[part] = (
                    self._whole(part, tensors) if isinstance(tensors, str) else self._served.write(part, tensors)
                )
        return self._served.cold_start

    def pack(self, blobs: Iterable[Blob]) -> dict[str, Blob]:
        """Return the smaller lossless form of served blobs, by digest, where there is one."""
        return self._served.packing.whole(blobs)

    def changes(self, clients: Sequence[str], parts: Sequence[PartKind]) -> dict[str, Smaller]:
        """Return deltas of served values, as the port."""
        asked = {part: self._aggregators[part] for part in sorted(self._aggregators.keys() & set(parts))}
        return self._served.changes(asked, self._vaults, clients)

    def arrive(
        self, client: str, part: PartKind, blob: Blob, encoding: str = "", served: bool = True, max_norm: float = 0.0
    ) -> Arrived:
        """Decode an update and check it in one pass over its tensors, as the port."""
        who, manifest = f"{client}'s {part} update", self.manifests[part]
        with ExitStack() as stack:
            file, before = self._opened(blob, stack), self._base(client, part, stack)
            context = ArrivalContext(client, part, who, encoding, manifest, before, served, max_norm)
            tensors = self._chains[part].on_arrival(PartUpdate(client, 0.0, file), context).tensors
            values = tensors.opened(tensors.by) if is_sealed(tensors) else cast(TensorSource, tensors)
            if values.stored:
                if values is tensors:
                    read_through(values)
                context.end()
                return Arrived(blob, context.facts)
            create = partial(self._blobs.create, f"{blob.name}.{encoding or 'values'}", durable=False)
            writer = stack.enter_context(TensorWriter(create, values.manifest))
            for name in writer.layout.manifest:
                writer.put(name, values[name])
            context.end()
            return Arrived(writer.close(), context.facts)

    def _base(self, client: str, part: PartKind, stack: ExitStack) -> TensorFile | None:
        """Return a client's values of a part before its training; None if it hands in their delta."""
        values = self._settings[part].returns == "values" and part != SOLVED and not self._is_rebased(part)
        slot = self._aggregators[part].slot(client) if values else None
        return self._opened(self._vaults[part].blob(slot), stack) if slot else None

    def _is_rebased(self, part: PartKind) -> bool:
        """Return whether devices hand in changes, maybe from an older state, where the aggregator takes values."""
        return self._settings[part].returns == "values" and self._plan.returns.get(part) == "change"

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
        closing, present = self._take_back(), self._slots()
        slots, refused = earlier_slots(present, self._recipes, self._closed, to, self._blobs)
        stage_earlier(self._vaults, present, slots)
        return self._unaggregated(closing, refused)

    def another_start(self) -> RoundOutcome:
        """Stage a state near the present one as the next one, as the port."""
        closing = self._take_back()
        stage_another(self._vaults, self._aggregators, self._plan.seed, self._closed)
        return self._unaggregated(closing)

    def _unaggregated(self, closing: _Closing, refused: str = "") -> RoundOutcome:
        """Return the outcome of a state that was staged without an aggregator."""
        self._aggregators = self._make()
        self._note_recipe(closing, None, {}, [])
        return RoundOutcome({}, self.staged_slots(), refused=refused)

    def _slots(self) -> list[Slot]:
        return [slot for _, vault in sorted(self._vaults.items()) for slot in vault.slots()]

    def _note_recipe(
        self,
        closing: _Closing,
        adaptation: AdaptationSpec | None,
        entries: Mapping[str, AcceptedUpdate],
        made: Sequence[Slot],
    ) -> None:
        """Note how the staged state was made; for one that no aggregator made, only what it replaces."""
        replaced = [slot for _, vault in sorted(self._vaults.items()) for slot in vault.replaced_slots()]
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
        for part in sorted(self._aggregators if adaptation is None else adaptation.returns):
            aggregator = self._aggregators[part]
            with ExitStack() as stack:
                theirs = {name: entry for name, entry in entries.items() if part in entry.parts}
                cohort = self._cohort(closing, part, theirs, votes, stack)
                if self._chains[part].sealed_by:
                    metrics |= {key: value for update in cohort.updates for key, value in update.facts.items()}
                numbers = aggregator.close_round(cohort.updates) if votes else aggregator.fit(cohort.updates)
                if cohort.unheard and self._settings[part].embeddings == "trained":
                    aggregator.fit(cohort.unheard)  # so a device that joins late gets near the others and has a vote again
                metrics |= {f"{part}.{key}": value for key, value in numbers.items()}
        return metrics

    def _cohort(
        self, closing: _Closing, part: PartKind, entries: Mapping[str, AcceptedUpdate], votes: bool, stack: ExitStack
    ) -> Cohort:
        """Return a cohort's updates of a part as its aggregator gets them."""
        norms, base = closing.norms.setdefault(part, {}), partial(self._base, part=part, stack=stack)
        context = RoundContext(part, self._closed + 1, base, votes, closing.bounded, norms=norms, unmasking=closing.unmasking)
        context.manifest, context.inputs = self.manifests[part], self._inputs(part, entries)
        context.attempt = max((entry.attempt for entry in entries.values()), default=0)
        cohort = Cohort(part, tuple(self._update(part, name, entry, stack) for name, entry in sorted(entries.items())))
        cohort = self._chains[part].on_cohort(cohort, context)
        closing.without_vote |= context.without_vote
        slot = self._aggregators[part].slot("") if self._is_rebased(part) else None
        present = None if slot is None else self._opened(self._vaults[part].blob(slot), stack)
        fresh = {name: entry.fresh for name, entry in entries.items()}  # a sum of updates has no name
        returns = self._settings[part].returns
        heard = (weighed(update, fresh.get(update.client, 1.0), returns, present) for update in cohort.updates)
        return replace(cohort, updates=tuple(heard))

    def _inputs(self, part: PartKind, entries: Mapping[str, AcceptedUpdate]) -> tuple[str, ...]:
        """Return the digests of what a part's next value follows from, for a value that all clients share."""
        slot = self._aggregators[part].slot("")
        if self._noise is None or slot is None:
            return ()
        return tuple(sorted([self._vaults[part].blob(slot).digest, *(entry.parts[part].digest for entry in entries.values())]))

    def _update(self, part: PartKind, name: str, entry: AcceptedUpdate, stack: ExitStack) -> PartUpdate:
        file, sealed_by = self._opened(entry.parts[part], stack), self._chains[part].sealed_by
        values = file if sealed_by else Cast(file, self.manifests[part])
        # Networks train on fewer samples than sums are over.
        samples = values[GRAM][-1] if part == SOLVED and not sealed_by else entry.row.samples or 0
        update = PartUpdate(name, float(samples), values, facts=entry.facts.get(part, {}))
        return update.sealed(sealed_by) if sealed_by else update

    def _take_back(self, unmasking: Unmasking | None = None) -> _Closing:
        """Forget what was staged and not committed, as a restart does: the round is closed again from the durable state."""
        if self._closing is not None:
            for vault in self._vaults.values():
                vault.take_back()
            self._aggregators, self._next_recipe = self._make(), None
        self._closing = _Closing({part: dict(norms) for part, norms in self._norms.items()}, unmasking)
        return self._closing

    def _opened(self, blob: Blob, stack: ExitStack) -> TensorFile:
        return stack.enter_context(TensorFile(self._blobs.open(blob)))

    def staged_slots(self) -> list[Slot]:
        return [slot for _, vault in sorted(self._vaults.items()) for slot in vault.staged_slots()]

    def remember(self, recipes: Sequence[StateRecipe]) -> None:
        """Note at the start how the present state and those before it were made, the newest first."""
        self._recipes = list(recipes)
        if recipes:
            self._norms = recipes[0].norms
        for vault in self._vaults.values():
            vault.remember(recipes[0].replaced if recipes else ())

    def settle(self, holders: Collection[str] = ()) -> None:
        """Make the staged state the state, after the commit. What was generated from the old one is removed.

        If deltas are served, devices still hold the old values: then they stay until the next commit; those of `holders` stay.
        """
        for vault in self._vaults.values():
            vault.settle()
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
        kept = {slot.file for slot in kept_slots(self._slots(), self._recipes)}
        self._blobs.remove([recipe.name for recipe in reversed(dropped)])
        self._blobs.remove([blob_of(slot).name for slot in kept_slots((), dropped) if slot.file not in kept])
