"""Who of the connected devices is alive: what each of their calls shows, under the device's name."""

from __future__ import annotations

from attune.common.pulse import Pulse


class Pulses:
    """One pulse a device, that of its newest stream. `every_s`: the pace that this server sets (server.keepalive_s)."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._of: dict[str, Pulse] = {}

    def __repr__(self) -> str:
        return f"Pulses({len(self._of)} devices, every {self.every_s:g} s)"

    def open(self, name: str) -> Pulse:
        """The pulse of a new stream; transfers from now on show life on it."""
        pulse = self._of[name] = Pulse()
        pulse.set_pace(self.every_s)
        return pulse

    def close(self, name: str, pulse: Pulse) -> None:
        """The stream is gone; a newer one of the same device stays."""
        if self._of.get(name) is pulse:
            del self._of[name]

    def of(self, name: str) -> Pulse:
        """Of a device without a stream: one that nobody watches."""
        return self._of.get(name) or Pulse()
