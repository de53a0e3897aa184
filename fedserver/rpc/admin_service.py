"""What the commands of a home ask of its running server."""

from __future__ import annotations

import grpc

from attune.common.errors import CertificateRefused
from attune.fedserver.federation.coordinator import REVOKED, Coordinator
from attune.fedserver.federation.members import Members
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.pb.admin_pb2 import TroublesReply, TroublesRequest, WakeReply, WakeRequest
from attune.fedserver.pb.admin_pb2_grpc import AdminServicer
from attune.fedserver.ports.ledger import Ledger


class AdminService(AdminServicer):
    def __init__(self, coordinator: Coordinator, members: Members, registrar: Registrar, ledger: Ledger) -> None:
        self._coordinator, self._members = coordinator, members
        self._registrar, self._ledger = registrar, ledger

    async def Wake(self, request: WakeRequest, context: grpc.aio.ServicerContext) -> WakeReply:  # noqa: N802
        """Looks at the database again: new tokens count, and devices that were revoked are cut off."""
        await self._registrar.refresh()
        revoked = {
            device.name: CertificateRefused(REVOKED.format(device.name))
            for device in await self._ledger.devices()
            if device.revoked
        }
        return WakeReply(connected=await self._members.shut_out(dict(revoked)))

    async def Troubles(self, request: TroublesRequest, context: grpc.aio.ServicerContext) -> TroublesReply:  # noqa: N802
        """What keeps a step from being carried out now."""
        return TroublesReply(troubles=self._coordinator.troubles.lines)
