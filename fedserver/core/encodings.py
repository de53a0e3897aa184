"""Encodings in which the parts of a method travel, to the server and back."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from attune.common.config import RoundSettings
from attune.common.errors import SettingError, nearest
from attune.common.exchange.registry import SECURE_SUM, SPOKEN_AS
from attune.common.exchange.transform import TransformSettings
from attune.common.protocol import ENCODINGS, EXTRAS, PACKED, PER_PART, RELATIVE


@dataclass(frozen=True)
class Encodings:
    """The encodings of one run.

    Attributes:
        handed_in: The encoding of each part that devices hand in; "" is none.
        packed: The parts that are served as PACKED.
    """

    handed_in: Mapping[str, str]
    packed: Sequence[str]
    transforms: Mapping[str, TransformSettings] = field(default_factory=dict)

    @property
    def on_devices(self) -> list[str]:
        """The transforms that devices must have."""
        return [name for name, settings in self.transforms.items() if settings.on_devices]

    def asked(self, part: str, served: bool) -> str:
        """Return the encoding that a device is asked to use for a part.

        A device that continues from its own state has no served value from which to send a change.
        """
        encoding = self.handed_in[part]
        return encoding if served or encoding not in RELATIVE else ""

    def check_here(self) -> None:
        """Check that this server has the packages for all encodings of the run.

        Raises:
            SettingError: A package is missing.
        """
        for setting, encoding in self._needed():
            if encoding not in ENCODINGS:
                raise SettingError(
                    f'{setting} = "{encoding}" needs the package {EXTRAS[encoding]}: install attune-fl[{encoding}]'
                )

    def check_device(self, name: str, known: Collection[str]) -> None:
        """Check that a device has all encodings of the run; `known` are those that it declares.

        Raises:
            SettingError: The device lacks an encoding.
        """
        for setting, encoding in self._needed():
            if encoding not in known:
                raise SettingError(
                    f"{name} cannot write parts as {encoding} ({setting} of this federation): update fedclient"
                    + (f", and install {EXTRAS[encoding]} beside it" if encoding in EXTRAS else "")
                )
        for transform in self.on_devices:
            if f"{SPOKEN_AS}{transform}" not in known:
                remedy = "update fedclient" if transform == SECURE_SUM else "install the package that offers it"
                raise SettingError(f"{name} does not have the transform {transform} of this federation: {remedy}")
        if len(set(self.handed_in.values())) > 1 and PER_PART not in known:
            raise SettingError(
                f"{name} cannot write each part in its own encoding (round.encodings of this federation): update fedclient"
            )

    def _needed(self) -> Iterable[tuple[str, str]]:
        """Return (the setting that asks for it, the encoding), each encoding once."""
        kinds = set(self.handed_in.values())
        asked = {encoding: "round.encoding" if len(kinds) == 1 else "round.encodings" for encoding in sorted(kinds) if encoding}
        if self.packed:
            asked.setdefault(PACKED, "round.served")
        return [(setting, encoding) for encoding, setting in asked.items()]


def encodings_of(
    settings: RoundSettings, parts: Iterable[str], transforms: Mapping[str, TransformSettings] | None = None
) -> Encodings:
    """Return the encodings and transforms of a run; `parts` are those of its method, private ones included.

    Raises:
        SettingError: The settings name a part that the method does not have.
    """
    travel = [part for part in parts if part != "private"]
    for part in settings.encodings:
        if part not in travel:
            raise SettingError(f"round.encodings.{part}: this method hands in no such part{nearest(part, travel)}")
    for name, transform in (transforms or {}).items():
        for part in transform.parts:
            if part not in travel:
                raise SettingError(f"transforms.{name}.parts: this method hands in no part {part!r}{nearest(part, travel)}")
    handed_in = {part: settings.encodings.get(part, settings.encoding) for part in travel}
    return Encodings(handed_in, [part for part in travel if PACKED in (handed_in[part], settings.served)], transforms or {})
