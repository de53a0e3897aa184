"""Groups of the engine: one part of one variant of the model, with its state, aggregator and checks. Groups share nothing.

The closed form is a group of its own for the devices of all variants, since its sums know no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from torch import Tensor

from attune.common.errors import SettingError
from attune.common.exchange.encodings import PartEncoding
from attune.common.exchange.registry import settings_of, transforms_for
from attune.common.exchange.transform import Chain, Transform, TransformSettings
from attune.common.methods.hypernetwork import travelling
from attune.common.methods.method import SOLVED, PartKind, assign
from attune.common.methods.registry import configured_in
from attune.common.methods.ridge import nothing_served, sizes_of
from attune.common.methods.settings.aggregators import AggregatorSettings, ClosedFormSettings, HypernetworkSettings
from attune.common.models.body import body_of, forget
from attune.common.models.registry import build
from attune.common.models.structure import components_by_part, tensors_of
from attune.common.plan import Plan
from attune.common.seeds import derive
from attune.common.task import TaskName
from attune.common.wire.header import Manifest
from attune.fedserver.core.records import Slot
from attune.fedserver.lab.aggregators.base import Aggregator, Tensors, Vault, write
from attune.fedserver.lab.aggregators.closed_form import earlier_sums
from attune.fedserver.lab.aggregators.described import ToldDescriptions
from attune.fedserver.lab.aggregators.mixing import CLIENT, COLD_START
from attune.fedserver.lab.build import aggregators_for
from attune.fedserver.lab.checks import ChangeBound, FiniteCheck, NormLimit, SampleBound, ShapeCheck, SumsCheck
from attune.fedserver.lab.client_noise import ClientNoise, home_key
from attune.fedserver.lab.vault import StateVault, place_of
from attune.fedserver.ports.blobs import Blobs, blob_of

if TYPE_CHECKING:
    from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork

VaultFor = Callable[[str], StateVault]
SHARE_MOVED = 0.01  # of a number, by which another start differs at most
FROM_ZERO = 0.001  # likewise, in a tensor of zeros


def chain_of(
    part: str,
    settings: AggregatorSettings,
    transforms: Mapping[str, TransformSettings],
    noise: ClientNoise | None,
    task: TaskName,
    values: Mapping[str, Tensor],
    vault: Vault,
) -> Chain:
    """Return the transforms of a part: bounds within a cohort, checks on arrival, those of the plan, and the encoding.

    With `noise`, clipping and noise take the place of the bounds. `values` are the part's tensors before round 1;
    `vault` has those of later rounds.
    """
    said_above = max(settings.bound, settings.bound_change)  # clipping changes half of a cohort in every round: that is no news
    bounds: list[Transform] = [
        SampleBound(settings.bound_samples),
        ChangeBound(settings.bound, settings.no_vote, said_above, settings.amplifies),
    ]
    checks: list[Transform] = [NormLimit(), FiniteCheck(), ShapeCheck()]
    if isinstance(settings, ClosedFormSettings):
        checks = [
            SumsCheck(task, sizes_of(values), partial(earlier_sums, vault)),
            *checks[1:],
        ]  # sums are no change, whose norm has a limit
    return Chain(
        [
            *(bounds if noise is None else [noise]),
            *checks,
            *transforms_for(part, transforms, beside=part == SOLVED),
            PartEncoding(),
        ]
    )


def noise_of(plan: Plan, blobs: Blobs, blocks: int) -> ClientNoise | None:
    """Return the transform that makes noisy sums of a cohort's changes; None without client-level privacy.

    Args:
        plan: The plan.
        blobs: The blobs of the home, with its secret.
        blocks: The number of parts that are released.
    """
    privacy = plan.noisy_sums
    if privacy is None:
        return None
    key = partial(home_key, blobs, privacy.insecure_seed, plan.run)
    quantile = privacy.clip_quantile
    return ClientNoise(privacy.clip, privacy.noise or 0.0, plan.expected_devices, blocks, key, quantile)


@dataclass
class Group:
    """A part of one variant.

    Attributes:
        part: The part.
        settings: The settings of its aggregator.
        vault: Its state.
        chain: The transforms of its updates.
        manifest: Tensors that devices hand in, by name.
        initial: Tensors of the part before round 1.
        aggregator: The aggregator, which is made again when a staged state is dropped, because it holds a part of that.
    """

    part: PartKind
    settings: AggregatorSettings
    vault: StateVault
    chain: Chain
    manifest: Manifest
    initial: Tensors
    aggregator: Aggregator

    @property
    def handed_in(self) -> dict[str, str]:
        """The slot of each client that has a value of its own, by client."""
        return {key.removeprefix(CLIENT): key for key in self.vault.keys() if key.startswith(CLIENT)}  # noqa: SIM118


class VariantModel:
    """Model of one variant on the server, of which the variant's groups are made.

    Args:
        plan: The plan as the variant's devices follow it.
        variant: The variant's name; empty: the plan's own model.
        vault_for: Returns the vault of a group, by its name.
        start: Its tensors before round 1; None: those that its seed draws.
    """

    def __init__(self, plan: Plan, variant: str, vault_for: VaultFor, start: Tensors | None = None) -> None:
        self.variant, self._plan, self._vault_for, self._start = variant, plan, vault_for, start
        self._model = build(plan.model, plan.seed)
        body = body_of(self._model)
        self.body_digest = body.digest if body else ""
        forget(self._model)
        self.told = ToldDescriptions(self._model)
        self._configured = configured_in(plan)
        self._assignment = assign(self._configured.method, self._model)
        kinds = {*self._assignment.values(), SOLVED}
        self.parts = [part for part in self._configured.aggregators if part in kinds]

    def aggregators(self) -> dict[str, Aggregator]:
        """Return new aggregators, by the names of their groups."""
        vault_for, variant = self._vault_for, self.variant
        of = aggregators_for(self._configured, self._model, lambda part: vault_for(place_of(part, variant)), self._plan.seed)
        for part, settings in self._configured.aggregators.items():
            if part in of and isinstance(settings, HypernetworkSettings) and settings.is_described:
                self.told.tell(cast("Hypernetwork", of[part]))
        return {place_of(part, variant): aggregator for part, aggregator in of.items()}

    def groups(self, noise: ClientNoise | None) -> Iterator[tuple[str, Group]]:
        """Yield the groups with their names."""
        plan, aggregators, transforms = self._plan, self.aggregators(), settings_of(self._plan.transforms)
        tensors, by_part = self._start or tensors_of(self._model), components_by_part(self._model, self._assignment)
        for part in self.parts:
            name, settings = place_of(part, self.variant), self._configured.aggregators[part]
            values = {key: value for key, value in tensors.items() if self._assignment[key] == part}
            initial, vault = nothing_served(plan) if part == SOLVED else values, self._vault_for(name)
            chain = chain_of(part, settings, transforms, noise, plan.task, initial, vault)
            manifest = travelling(settings, initial, by_part.get(part, {}))
            yield name, Group(part, settings, vault, chain, manifest, initial, aggregators[name])


def models_of(plan: Plan, vault_for: VaultFor, start: Tensors | None = None) -> list[VariantModel]:
    """Return the model of a plan, which alone has the closed form, and those of its variants.

    `start` are the tensors of a given model; None: training begins with those that the seed draws.

    Raises:
        SettingError: A model has a frozen body, or not the same parts as the others.
    """
    models = [VariantModel(plan.of_variant(""), "", vault_for, start)]
    for name in sorted(plan.variants):
        variant = msgspec.structs.replace(plan.of_variant(name), closed_form=False)
        models.append(VariantModel(variant, name, vault_for))
        if {*models[-1].parts, SOLVED} != {*models[0].parts, SOLVED}:
            parts, others = sorted(models[-1].parts), sorted({*models[0].parts} - {SOLVED})
            raise SettingError(f"variant {name} of the model has the parts {parts}, and the model itself has {others}")
    if len(models) > 1 and any(model.body_digest for model in models):
        raise SettingError("model.variant cannot be combined with a frozen body: the plan pins one body for all devices")
    return models


def make_again(groups: Mapping[str, Group], models: Iterable[VariantModel]) -> None:
    """Make all aggregators again, from what the vaults have."""
    for model in models:
        for name, aggregator in model.aggregators().items():
            groups[name].aggregator = aggregator


# --- next states that no aggregator makes of updates: an earlier one, or one near the present one


def stage_earlier(vaults: Mapping[str, StateVault], present: Iterable[Slot], slots: Iterable[Slot]) -> None:
    """Stage an earlier state's slots. Clients without a value of their own at that time fall back to the cold start."""
    names = {(slot.part, slot.key) for slot in slots}
    for slot in sorted(set(slots) - set(present), key=lambda slot: slot.file):
        vaults[slot.part].stage(slot.key, blob_of(slot))
    for slot in present:
        if slot.key.startswith(CLIENT) and (slot.part, slot.key) not in names:
            vault = vaults[slot.part]
            write(vault, slot.key, vault.read(COLD_START))


def stage_another(groups: Mapping[str, Group], seed: int, closed: int) -> None:
    """Stage values that all clients share, each number a little moved. A restart repeats the bits.

    Args:
        groups: Parts of the state; their aggregators know which value is served.
        seed: The federation's seed.
        closed: The number of rounds that the present state has taken in.
    """
    for name, group in sorted(groups.items()):
        if (slot := group.aggregator.slot("")) is not None:
            write(group.vault, slot, moved(group.vault.read(slot), derive(seed, "another start", closed, name)))


def moved(tensors: Mapping[str, Tensor], seed: int) -> Tensors:
    """Return tensors near these: each floating number by up to SHARE_MOVED of itself, those of a tensor of zeros by FROM_ZERO.

    Other zeros stay, and so does each sign: a variance stays one.
    """
    draws, near = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name in sorted(tensors):
        near[name] = tensor = tensors[name]
        if tensor.is_floating_point():
            shares = 2 * torch.rand(tensor.shape, generator=draws, dtype=torch.float64) - 1
            scale = SHARE_MOVED * tensor.double() if bool(tensor.any()) else FROM_ZERO
            near[name] = (tensor.double() + scale * shares).to(tensor.dtype)
    return near
