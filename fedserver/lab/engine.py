"""Everything with tensors on the server. Runs on the worker's one thread, so nothing here needs a lock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

from attune.common.errors import UpdateRefused
from attune.common.methods.method import PartKind, assign, options_of
from attune.common.methods.registry import method_of
from attune.common.models.registry import build
from attune.common.models.structure import tensors_of
from attune.common.plan import Plan
from attune.common.wire.checks import check_finite, check_manifest, squared_norm
from attune.common.wire.files import Blob, TensorFile, write_tensors
from attune.common.wire.header import layout_of
from attune.common.wire.tensors import Manifest, manifest_of
from attune.fedserver.core.adaptation import Adaptation
from attune.fedserver.core.records import Slot
from attune.fedserver.lab.aggregators.base import Aggregator, Update
from attune.fedserver.lab.build import aggregators_for
from attune.fedserver.lab.vault import Vault
from attune.fedserver.stores.inbox import Entry

HEADER_SLACK_BYTES = 1 << 16  # another writer's safetensors header may be longer than ours


class Engine:
    """The aggregators of one federation over their vaults; `slots` is the durable state, empty for a new federation."""

    def __init__(self, plan: Plan, slots: Sequence[Slot], state: Path, serve: Path, closed_rounds: int) -> None:
        self._serve_folder = serve
        model = build(plan.model, plan.seed)
        method = method_of(plan)
        assignment = assign(method, model)
        initial = tensors_of(model)
        parts: list[PartKind] = [kind for kind in get_args(PartKind) if kind != "private" and kind in assignment.values()]
        self.vaults = {part: Vault(state, part, slots, closed_rounds + 1 if slots else 0) for part in parts}
        self.aggregators: dict[PartKind, Aggregator] = aggregators_for(
            method, plan.method_options, model, self.vaults.__getitem__, plan.seed
        )
        self._returns = {part: found.returns for part, found in options_of(method, plan.method_options).aggregators.items()}
        self.manifests: dict[PartKind, Manifest] = {}
        for part, aggregator in self.aggregators.items():
            own = {name: tensor for name, tensor in initial.items() if assignment[name] == part}
            self.manifests[part] = manifest_of(own)
            if not slots:
                aggregator.start(own)
        self._generated: dict[tuple[str, str], Blob] = {}
        self._cold_start: dict[str, Blob] = {}

    @property
    def parts(self) -> list[PartKind]:
        """The parts that devices hand in, in a fixed order."""
        return sorted(self.manifests)

    def max_bytes(self, part: PartKind) -> int:
        """The largest blob that can be an answer for `part`."""
        return layout_of(self.manifests[part]).size + HEADER_SLACK_BYTES

    def serve(self, clients: Sequence[str]) -> dict[str, dict[str, Blob]]:
        """For each client and part the file with what it is served now: common files, its own slot, or freshly generated."""
        served: dict[str, dict[str, Blob]] = {client: {} for client in clients}
        for part, aggregator in sorted(self.aggregators.items()):
            for client in sorted(clients):
                aggregator.admit(client)
            slots = {client: aggregator.slot(client) for client in clients}
            self._generate(part, aggregator, [client for client in sorted(clients) if slots[client] is None])
            for client, slot in slots.items():
                served[client][part] = self._generated[part, client] if slot is None else self.vaults[part].blob(slot)
        return served

    def cold_start(self) -> dict[str, Blob]:
        """For each part the file that a device of which nothing is known is served: devices compare their own model with it."""
        for part, aggregator in sorted(self.aggregators.items()):
            if part not in self._cold_start:
                found = aggregator.cold_start()
                if isinstance(found, str):
                    self._cold_start[part] = self.vaults[part].blob(found)
                else:
                    self._cold_start[part] = write_tensors(self._serve_folder / f"{part}.safetensors", found)
        return self._cold_start

    def _generate(self, part: str, aggregator: Aggregator, clients: Sequence[str]) -> None:
        missing = [client for client in clients if (part, client) not in self._generated]
        if missing:
            for client, tensors in aggregator.generate(missing):
                path = self._serve_folder / f"{part}.{client}.safetensors"
                self._generated[part, client] = write_tensors(path, tensors)

    def check(self, client: str, part: PartKind, path: Path, max_norm: float) -> None:
        """Refuses an update that could harm the state. Errors: WireError, UpdateRefused, each naming device and tensor.

        `max_norm` limits the L2 norm of the change from what was served; 0: no limit.
        """
        who = f"{client}'s {part} update"
        with TensorFile(path) as update, ExitStack() as stack:
            check_manifest(update.manifest, self.manifests[part], who)
            slot = self.aggregators[part].slot(client) if self._returns[part] == "values" else None
            base = stack.enter_context(TensorFile(self.vaults[part].blob(slot).path)) if max_norm and slot else None
            total = 0.0
            for name, tensor in update.items():
                check_finite(name, tensor, who)
                if max_norm:
                    total += squared_norm(tensor - base[name] if base is not None else tensor)
        if max_norm and math.sqrt(total) > max_norm:
            raise UpdateRefused(f"{who} changes the weights by a norm of {math.sqrt(total):.3g}; the limit is {max_norm:.3g}")

    def aggregate(self, entries: Mapping[str, Entry]) -> dict[str, float]:
        """A cohort's accepted updates into the next state, staged in the vaults. Returns the aggregators' metrics."""
        return self._close(entries, {part: aggregator.close_round for part, aggregator in self.aggregators.items()})

    def adapt(self, entries: Mapping[str, Entry], adaptation: Adaptation) -> dict[str, float]:
        """As `aggregate`, for newcomers to a finished federation: of the parts that they hand in."""
        chosen = {part: self.aggregators[part] for part in adaptation.returns}
        return self._close(entries, {p: one.close_round if adaptation.common else one.fit for p, one in chosen.items()})

    def _close(
        self, entries: Mapping[str, Entry], closes: Mapping[PartKind, Callable[[list[Update]], dict[str, float]]]
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for part, close in sorted(closes.items()):
            with ExitStack() as stack:
                updates = [
                    Update(name, float(entry.row.samples or 0), stack.enter_context(TensorFile(entry.parts[part])))
                    for name, entry in sorted(entries.items())
                ]
                metrics |= {f"{part}.{key}": value for key, value in close(updates).items()}
        return metrics

    def staged_slots(self) -> list[Slot]:
        return [slot for _, vault in sorted(self.vaults.items()) for slot in vault.staged_slots()]

    def settle(self) -> None:
        """After the commit: the staged state is the state, and what was generated from the old one goes."""
        for vault in self.vaults.values():
            vault.settle()
        made = (
            blob for blob in (*self._generated.values(), *self._cold_start.values()) if blob.path.parent == self._serve_folder
        )
        for blob in made:
            blob.path.unlink(missing_ok=True)
        self._generated, self._cold_start = {}, {}
