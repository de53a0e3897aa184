"""In which encodings the parts of a method travel: what devices hand in, and what they are served."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attune.common.config import RoundSettings
from attune.common.errors import SettingError, nearest
from attune.common.protocol import ENCODINGS, EXTRAS, PACKED, PER_PART, RELATIVE


@dataclass(frozen=True)
class Encodings:
    """handed_in: of each part that travels; "" is none. packed: the parts that are served as PACKED."""

    handed_in: Mapping[str, str]
    packed: Sequence[str]

    def asked(self, part: str, served: bool) -> str:
        """Of what a device hands in. One that goes on from its own state shares nothing from which to write a change."""
        encoding = self.handed_in[part]
        return encoding if served or encoding not in RELATIVE else ""

    def check_here(self) -> None:
        """Errors: SettingError where this server cannot read what devices would hand in, or write what they are served."""
        for setting, encoding in self._needed():
            if encoding not in ENCODINGS:
                raise SettingError(
                    f'{setting} = "{encoding}" needs the package {EXTRAS[encoding]}: install attune-fl[{encoding}]'
                )

    def check_device(self, name: str, known: Collection[str]) -> None:
        """known: what the device says of itself. Errors: SettingError where that is not enough."""
        for setting, encoding in self._needed():
            if encoding not in known:
                raise SettingError(
                    f"{name} cannot write parts as {encoding} ({setting} of this federation): update fedclient"
                    + (f", and install {EXTRAS[encoding]} beside it" if encoding in EXTRAS else "")
                )
        if len(set(self.handed_in.values())) > 1 and PER_PART not in known:
            raise SettingError(
                f"{name} cannot write each part in its own encoding (round.encodings of this federation): update fedclient"
            )

    def _needed(self) -> Iterable[tuple[str, str]]:
        """(the setting that asks for it, the encoding), each encoding once."""
        kinds = set(self.handed_in.values())
        asked = {encoding: "round.encoding" if len(kinds) == 1 else "round.encodings" for encoding in sorted(kinds) if encoding}
        if self.packed:
            asked.setdefault(PACKED, "round.served")
        return [(setting, encoding) for encoding, setting in asked.items()]


def encodings_of(settings: RoundSettings, parts: Iterable[str]) -> Encodings:
    """parts: of the method, private or not. Errors: SettingError for a part that it does not have."""
    travel = [part for part in parts if part != "private"]
    for part in settings.encodings:
        if part not in travel:
            raise SettingError(f"round.encodings.{part}: this method hands in no such part{nearest(part, travel)}")
    handed_in = {part: settings.encodings.get(part, settings.encoding) for part in travel}
    return Encodings(handed_in, [part for part in travel if PACKED in (handed_in[part], settings.served)])
