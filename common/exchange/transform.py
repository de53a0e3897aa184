"""The chain of transforms: everything that happens to an update between training and aggregation.

A transform has three hooks. On a device the transforms run in the order of the chain, on a cohort too; on arrival they run in
reverse, because what was done last on the device is undone first. Tensors are lazy: a hook returns an update whose tensors are
computed at each access, so that an arriving update is read once and only one piece of it is in memory.

No torch here: the server reads which transforms a federation has, and what each excludes, without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn, Protocol, TypeGuard

import msgspec
from msgspec.structs import replace

from attune.common.errors import UpdateRefused

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from attune.common.wire.header import Manifest
    from attune.common.wire.tensors import TensorSource


class NotASum(ArithmeticError):
    """Unmasked numbers that cannot be the sum of a cohort: a device has handed in something else than it should."""


class PartUpdate(msgspec.Struct, frozen=True):
    """One part of one device's update; `tensors` may be read or computed at each access."""

    client: str
    weight: float  # m_i: training samples, or at most so many as count
    tensors: Mapping[str, Tensor]
    absent: int = 0  # how many more of its cohort have no vote
    fresh: float = 1.0  # weight by its staleness for the other devices, where values are handed in (buffered rounds)
    facts: Mapping[str, float] = {}  # what transforms found out when it arrived, such as "norm"
    members: tuple[str, ...] = ()  # of an exact sum of several devices: their names

    @property
    def source(self) -> TensorSource:
        """The lazy tensors of an update on the server.

        Raises:
            UpdateRefused: The update is sealed.
        """
        if is_sealed(self.tensors):
            self.tensors.refuse()
        return self.tensors  # type: ignore[return-value]  # on the server they are lazy; a cast would be another call

    def sealed(self, by: str) -> PartUpdate:
        """Return the update as one that only the transform `by` can read: alone, its values mean nothing."""
        return replace(self, tensors=SealedTensors(self.source, self.client, by))


class SealedTensors(Mapping[str, "Tensor"]):
    """Tensors whose values cannot be read one update at a time. The names are known; reading raises UpdateRefused."""

    def __init__(self, tensors: TensorSource, client: str, by: str) -> None:
        self._tensors, self._client, self.by = tensors, client, by

    def refuse(self) -> NoReturn:
        """Refuse to be read."""
        raise UpdateRefused(f"the update of {self._client} is sealed by {self.by}: only the sum of its cohort can be read")

    def __getitem__(self, name: str) -> Tensor:
        self.refuse()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def opened(self, by: str) -> TensorSource:
        """Return the tensors as they were sealed, to the transform that sealed them."""
        if by != self.by:
            raise UpdateRefused(f"{by} cannot open the update of {self._client}, which is sealed by {self.by}")
        return self._tensors


def is_sealed(tensors: Mapping[str, Tensor]) -> TypeGuard[SealedTensors]:
    """Return whether only the sum of a cohort can be read. isinstance would ask Mapping, which takes three calls."""
    return type(tensors) is SealedTensors


class Cohort(msgspec.Struct, frozen=True):
    """A round's updates of one part.

    A transform may replace all updates by a single one that stands for their sum: its weight is the sum of the weights, and
    its tensors are the weighted mean.

    Attributes:
        unheard: Updates without a vote, bounded. They move nothing but the embedding of their own device.
    """

    part: str
    updates: tuple[PartUpdate, ...]
    unheard: tuple[PartUpdate, ...] = ()


SUMMED = ("loss", "accuracy_before", "accuracy_after")  # metrics of an order that can be handed in with others' alone
REACHES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # multiples of the clipping bound above which largest changes are counted


def above(part: str, reach: float) -> str:
    """Return the name of the number of devices with a change above `reach` clipping bounds, among a round's metrics."""
    return f"{part} above {reach:g}"


class DeviceContext(msgspec.Struct):
    """Facts that a transform may use on the device.

    Attributes:
        before: The part as the device received it, from which its training began; None if it began from its own state.
        change: Whether the update holds the change from `before`, instead of values.
        owed: Rounding error of the last update, by tensor.
        errors: Rounding error of this update, by tensor; transforms add to it.
        seed: Return the seed for a purpose, of this device and round.
        measured: Metrics of the order, which a transform may hand in with others' alone.
    """

    client: str
    part: str
    round: int
    encoding: str
    change: bool
    before: Mapping[str, Tensor] | None
    owed: Mapping[str, Tensor]
    seed: Callable[[str], int]
    errors: dict[str, Tensor] = {}
    measured: Mapping[str, float] = {}


class ArrivalContext(msgspec.Struct):
    """Facts that a transform may use when an update arrives at the server.

    Attributes:
        who: The update as errors name it.
        manifest: Dtype and shape of each tensor of the part.
        before: Server's value of the part from which the device's training began; None if changes are handed in.
        served: Whether the device's order served that value.
        max_norm: The largest L2 norm of a change; 0: no limit.
        facts: Findings of the transforms, such as the norm of a change; kept with the update until its cohort is aggregated.
        at_end: Called when all tensors were read. Each may refuse the update.
    """

    client: str
    part: str
    who: str
    encoding: str
    manifest: Manifest
    before: TensorSource | None
    served: bool
    max_norm: float = 0.0
    facts: dict[str, float] = {}
    at_end: list[Callable[[], None]] = []

    def end(self) -> None:
        """Run the checks that need the whole update, such as the one of its norm."""
        for check in self.at_end:
            check()


class MaskRemover(Protocol):
    """Secrets that take the masks off the sum of a cohort (attune.common.secure)."""

    @property
    def seeds(self) -> Sequence[tuple[bytes, bool]]:
        """The seed of each mask to add to the sum, and whether it is subtracted instead."""

    def mask(self, part: str, tensor: int, size: int) -> np.ndarray:
        """Return what must be added to the sum of a part's tensor, (size,) uint32; `tensor` is its number in the part."""


class RoundContext(msgspec.Struct):
    """Facts that a transform may use when a cohort is aggregated.

    Attributes:
        before: Return what the server holds of a device's part; None if changes are handed in.
        votes: Whether updates outvote one another. What is fitted to each newcomer alone has no vote.
        bounded: Devices whose change is above the bound, with how many median norms it is; transforms add to it.
        without_vote: Devices whose updates do not count; transforms add to it.
        norms: Norms of the latest changes of the fleet's devices, oldest first; the bound on changes adds those of the cohort.
            With client-level privacy, the adaptive clipping norm alone. They are durable with the part's value.
        unmasking: Secrets that take the masks off the cohort's sum, under secure aggregation.
        inputs: Digests of what the next value follows from: the part's present value, and the cohort's updates.
        attempt: The attempt of the round, under secure aggregation.
        manifest: Dtype and shape of each tensor of the part.
    """

    part: str
    round: int
    before: Callable[[str], TensorSource | None]
    votes: bool = True
    bounded: dict[str, float] = {}
    without_vote: set[str] = set()
    norms: dict[str, float] = {}
    unmasking: MaskRemover | None = None
    inputs: tuple[str, ...] = ()
    attempt: int = 0
    manifest: Manifest = {}


class Transform(Protocol):
    """One step that changes, checks or bounds updates."""

    name: str
    seals: bool  # whether the server can read only the sum of a cohort, which `on_cohort` makes

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        """Clip, add noise, encode or mask an update before it is handed in."""
        ...

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        """Decode or check an update. It may be refused at once: UpdateRefused or WireError."""
        ...

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        """Bound updates against the others, add noise to their sum, or unmask it."""
        ...


class Unchanged:
    """A transform that changes nothing: the base of those that need only some of the hooks."""

    name = ""
    seals = False

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        return update

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        return update

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        return cohort


class Chain:
    """Transforms in order, from the first on the device to the one that is nearest to the wire."""

    def __init__(self, transforms: Iterable[Transform]) -> None:
        self.transforms = tuple(transforms)

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        for transform in self.transforms:
            update = transform.on_device(update, context)
        return update

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        for transform in reversed(self.transforms):
            update = transform.on_arrival(update, context)
            update = update.sealed(transform.name) if transform.seals else update
        return update

    @property
    def sealed_by(self) -> str:
        """The transform that alone can read what devices hand in; empty: single updates can be read."""
        return next((transform.name for transform in self.transforms if transform.seals), "")

    def on_cohort(self, cohort: Cohort, context: RoundContext) -> Cohort:
        for transform in self.transforms:
            cohort = transform.on_cohort(cohort, context)
        return cohort


class TransformSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a transform, [transforms.NAME]; a subclass adds its own.

    `implementation` is the class, or "package.module:Class", which is called with the name and the settings.
    """

    implementation: ClassVar[str | type] = ""
    excludes: ClassVar[frozenset[str]] = frozenset()  # names of transforms that it cannot be combined with
    growth: ClassVar[float] = 1.0  # how many times as many bytes an update may have after it, on the device
    on_devices: ClassVar[bool] = True  # False: it has no hook on devices, so that they need not have it

    parts: tuple[str, ...] = ()  # to which it applies; empty: to all that devices hand in

    def applies_to(self, part: str) -> bool:
        """Return whether the transform is in the chain of this part."""
        return not self.parts or part in self.parts
