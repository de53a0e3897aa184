"""What a command of the operator asks of a running server: look at the database again, now."""

from __future__ import annotations

from attune.common.errors import CertificateRefused
from attune.fedserver.core.coordinator import Coordinator
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.stores.sqlite import Store


class Operators:
    def __init__(self, coordinator: Coordinator, registrar: Registrar, store: Store) -> None:
        self._coordinator, self._registrar, self._store = coordinator, registrar, store

    async def wake(self) -> int:
        """New tokens count, and devices that were revoked are cut off. Returns how many devices stay connected."""
        self._registrar.refresh()
        revoked = {
            device.name: CertificateRefused(f"the operator of this federation has revoked {device.name}")
            for device in self._store.devices()
            if device.revoked
        }
        return await self._coordinator.shut_out(dict(revoked))
