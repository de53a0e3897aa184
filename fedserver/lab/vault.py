"""The aggregators' state as versioned blobs of tensors: written beside the old ones, made true by the round's commit.

A recipe says how a state was made, and what it replaced. The newest recipe makes a damaged blob again. All recipes that are
kept, one for each round, lead back to earlier states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import msgspec
import torch
from typing_extensions import Self

from attune.common.methods.method import SOLVED, PartKind
from attune.common.text import from_json
from attune.common.wire.blobs import Blob
from attune.common.wire.files import TensorFile, TensorWriter
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import is_finite
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.core.collector import Unmasking
from attune.fedserver.core.records import AcceptedUpdate, Slot
from attune.fedserver.ports.blobs import STATE, Blobs, Damaged, blob_of


class NotFinite(ArithmeticError):
    """The next state would have a NaN or an infinite number. The text names the tensor."""


class _SlotWriter:
    """A TensorWriter that stages its blob in the vault when the `with` block ends well. Takes finite numbers only."""

    def __init__(self, vault: StateVault, key: str, writer: TensorWriter) -> None:
        self._vault, self._key, self._writer = vault, key, writer

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor.

        Raises:
            NotFinite: A value is NaN or infinite.
            Malformed, DiskFull: As in TensorWriter.
        """
        if not is_finite(tensor):
            raise NotFinite(f"{name} of {self._key} would not be finite")
        self._writer.put(name, tensor)

    def __enter__(self) -> _SlotWriter:
        self._writer.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._vault.stage(self._key, self._writer.close())
        self._writer.__exit__(kind, error, trace)


class StateVault:
    """One part's slots. Reads see staged writes at once; `staged_slots` and `settle` belong to the commit.

    `version` names the blobs to be written: it must be larger than that of any durable slot, so that nothing is overwritten.
    `area`: what those names begin with.
    """

    def __init__(self, blobs: Blobs, part: str, slots: Iterable[Slot], version: int, area: str = STATE) -> None:
        self._blobs, self._part, self._version, self._area = blobs, part, version, area
        self._slots = {slot.key: slot for slot in slots if slot.part == part}
        self._staged: dict[str, Blob] = {}
        self._replaced: dict[str, Slot] = {}  # by key, what was true before the last commit, and is no longer

    def keys(self) -> list[str]:
        return sorted(self._slots.keys() | self._staged.keys())

    def blob(self, key: str) -> Blob:
        """Return the blob that holds `key`, staged or durable.

        Raises:
            KeyError: There is none.
        """
        return self._staged.get(key) or blob_of(self._slots[key])

    def read(self, key: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors under `key`.

        Raises:
            KeyError: There is none.
            Damaged: The blob's bytes are not the written ones.
        """
        return TensorFile(self._blobs.open(self.blob(key)))

    def writer(self, key: str, manifest: Manifest) -> _SlotWriter:
        name = f"{self._area}{self._part}.{key.replace('/', '~')}.{self._version}.safetensors"
        return _SlotWriter(self, key, TensorWriter(partial(self._blobs.create, name), manifest))

    def stage(self, key: str, blob: Blob) -> None:
        self._staged[key] = blob

    def before(self, key: str) -> Blob | None:
        """Return the blob that held `key` before the last commit, if that replaced it."""
        slot = self._replaced.get(key)
        return None if slot is None else blob_of(slot)

    def staged_slots(self) -> list[Slot]:
        return [
            Slot(self._part, key, blob.name.removeprefix(self._area), blob.digest, blob.size)
            for key, blob in sorted(self._staged.items())
        ]

    def replaced_slots(self) -> list[Slot]:
        """Return the slots that the staged ones will replace."""
        return [self._slots[key] for key in sorted(self._staged) if key in self._slots]

    def remember(self, replaced: Iterable[Slot]) -> None:
        """Note at the start which slots were valid before the last commit."""
        self._replaced = {slot.key: slot for slot in replaced if slot.part == self._part}

    def take_back(self) -> None:
        """Forget what was staged. Its blobs are written again under the same names."""
        self._staged = {}

    def slots(self) -> list[Slot]:
        """Return the durable slots."""
        return list(self._slots.values())

    def settle(self) -> None:
        """Make the staged slots the state, after the commit. What they replaced is removed with its recipe."""
        self._replaced = {slot.key: slot for slot in self.replaced_slots()}
        self._slots |= {slot.key: slot for slot in self.staged_slots()}
        self._staged = {}
        self._version += 1


def place_of(part: str, variant: str) -> str:
    """Return the name by which slots and files of a part are known: its own; for devices of a variant `part@variant`."""
    return part if part == SOLVED or not variant else f"{part}@{variant}"


class OfPart(Protocol):
    """Something that belongs to a part of the model."""

    part: PartKind


P = TypeVar("P", bound=OfPart)


class ByVariant(Generic[P]):
    """Something for each part of each variant of the model, by name, and for which clients it is.

    Args:
        by_name: The things.
        variants: The variant of each client; those that are not named have the plan's own model.
    """

    def __init__(self, by_name: Iterable[tuple[str, P]], variants: Mapping[str, str]) -> None:
        self.by_name, self.variants = dict(sorted(by_name, key=lambda item: item[0])), dict(variants)

    def __iter__(self) -> Iterator[P]:
        return iter(self.by_name.values())

    def of(self, client: str, part: str) -> P:
        """Return what a client's part has."""
        return self.by_name[place_of(part, self.variants.get(client, ""))]

    def members(self, clients: Iterable[str], solved: bool = True) -> Iterator[tuple[str, P, list[str]]]:
        """Yield each thing, with its name and those of the clients for which it is; maybe without the closed form, for all."""
        names, by_variant = list(clients), dict[str, list[str]]()
        if self.variants:
            for client in names:
                by_variant.setdefault(self.variants.get(client, ""), []).append(client)
        else:
            by_variant[""] = names
        for name, one in self.by_name.items():
            if one.part == SOLVED and solved:
                yield name, one, names
            elif one.part != SOLVED:
                yield name, one, by_variant.get(name.removeprefix(one.part)[1:], [])


Norms = Mapping[str, Mapping[str, float]]  # by part and client, the norm of its latest change


class StateRecipe(msgspec.Struct, frozen=True):
    """A round's ingredients. The blobs that it names are kept as long as it is."""

    round: int
    adaptation: AdaptationSpec | None  # None: a round of training
    admitted: Sequence[str]  # clients that were admitted since the state before
    entries: Mapping[str, AcceptedUpdate]  # the cohort's updates, by client
    replaced: Sequence[Slot]  # slots of the state before that this state replaced
    made: Sequence[Slot]
    founders: Sequence[str] = ()  # those of `admitted` that are founders
    norms_before: Norms = {}
    norms: Norms = {}  # with those of this round
    unmasking: Unmasking | None = None  # of a sum that only the masks' secrets give
    descriptions: Mapping[str, Sequence[float]] = {}  # what those of `admitted` say of their data, where that counts

    @property
    def name(self) -> str:
        """Name of its blob."""
        return name_of(self.round)

    def before(self, slots: Iterable[Slot]) -> list[Slot]:
        """Return the slots before the round, from those after it."""
        changed = {(slot.part, slot.key) for slot in (*self.made, *self.replaced)}
        return [*(slot for slot in slots if (slot.part, slot.key) not in changed), *self.replaced]

    @classmethod
    def load(cls, blobs: Blobs, round_: int) -> Self | None:
        """Return how the state after this round was made; None if that is unknown or unreadable."""
        try:
            return from_json(blobs.get(name_of(round_)), cls)
        except (KeyError, msgspec.DecodeError):
            return None


def recipes_of(blobs: Blobs, closed: int) -> list[StateRecipe]:
    """Return the recipes that are kept, the newest first: how the state after round `closed` was made, and those before it."""
    recipes: list[StateRecipe] = []
    while (recipe := StateRecipe.load(blobs, closed - len(recipes))) is not None:
        recipes.append(recipe)
    return recipes


def earlier_slots(
    present: list[Slot], recipes: Sequence[StateRecipe], closed: int, to: int, blobs: Blobs
) -> tuple[list[Slot], str]:
    """Return the slots after the round `to`, or the present ones and why they stay.

    Args:
        present: The present slots.
        recipes: How they were made, the newest recipe first.
        closed: The round after which they were made.
        to: The round of the earlier state.
        blobs: The store of the state.
    """
    slots, later = present, [recipe for recipe in recipes if recipe.round > to]
    if len(later) < closed - to:
        return present, "; but that state is not known any more, so the present one stays"
    for recipe in later:
        slots = recipe.before(slots)
    try:
        for slot in slots:
            blobs.open(blob_of(slot)).close()
    except Damaged as damaged:
        return present, f"; but that state is damaged, so the present one stays ({damaged})"
    return slots, ""


def kept_slots(slots: Iterable[Slot], recipes: Iterable[StateRecipe]) -> list[Slot]:
    """Return the present slots and those of earlier states, each file once."""
    by_file = {slot.file: slot for slot in (*slots, *(slot for recipe in recipes for slot in recipe.replaced))}
    return list(by_file.values())


def name_of(round_: int) -> str:
    """Return the name of the recipe's blob for a round."""
    return f"{STATE}recipe.{round_}.json"
