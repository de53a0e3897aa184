"""Admin service: calls of the home's commands, and of operators over the network."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import msgspec

from attune.common.errors import CertificateRefused, SettingError
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.federation.streams import REVOKED
from attune.fedserver.identity.admin import DAY_S, LONGEST_TTL_S, FederationAdmin
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.pb import admin_pb2 as pb
from attune.fedserver.pb.admin_pb2_grpc import AdminServicer
from attune.fedserver.ports.ledger import MemberLedger

T = TypeVar("T")


class AdminService(AdminServicer):
    """Calls that only an operator's certificate may make. A decision is carried out to its end, also if its caller vanishes."""

    def __init__(
        self,
        coordinator: Coordinator,
        registrar: Registrar,
        admin: FederationAdmin,
        ledger: MemberLedger,
    ) -> None:
        self._coordinator, self._members = coordinator, coordinator.members
        self._registrar, self._admin, self._ledger = registrar, admin, ledger

    async def Wake(self, request: pb.WakeRequest, context: grpc.aio.ServicerContext) -> pb.WakeReply:  # noqa: N802
        """Read the database again: new tokens become valid, and revoked devices are cut off."""
        return pb.WakeReply(connected=await self.wake())

    async def wake(self) -> int:
        """Read the database again, and return the number of connected devices. This goes on without the caller."""
        return await self._coordinator.state.turns.carry(self._wake())

    async def _wake(self) -> int:
        await self._registrar.refresh()
        revoked = [device.name for device in await self._ledger.devices() if device.revoked]
        return await self._members.shut_out({name: CertificateRefused(REVOKED.format(name)) for name in revoked})

    async def Troubles(self, request: pb.TroublesRequest, context: grpc.aio.ServicerContext) -> pb.TroublesReply:  # noqa: N802
        """Return a line for each step that cannot be carried out now."""
        return pb.TroublesReply(troubles=self._coordinator.state.troubles.lines)

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseReply:  # noqa: N802
        await self._coordinator.state.turns.carry(self._pause(request.paused))
        record = self._coordinator.state.round.record
        return pb.PauseReply(phase=str(record.phase), round=record.round)

    async def _pause(self, on: bool) -> None:
        await self._admin.note_pause(on)
        await self._coordinator.pause(on)

    async def NewToken(self, request: pb.NewTokenRequest, context: grpc.aio.ServicerContext) -> pb.NewTokenReply:  # noqa: N802
        ttl_s = request.ttl_s or DAY_S
        if not (math.isfinite(ttl_s) and 0 < ttl_s <= LONGEST_TTL_S):
            raise SettingError(f"a token lives from a second to ten years, not {ttl_s:g} s")
        key = self._registrar.authority.public_key_compressed
        made = self._admin.new_token(key, request.uses or 1, ttl_s, only_for=request.only_for)
        token = await self._coordinator.state.turns.carry(made)
        await self._registrar.refresh()
        return pb.NewTokenReply(token=token)

    async def Tokens(self, request: pb.TokensRequest, context: grpc.aio.ServicerContext) -> pb.TokensReply:  # noqa: N802
        return pb.TokensReply(tokens=[pb.Token(**msgspec.structs.asdict(token)) for token in await self._admin.tokens()])

    async def RevokeToken(  # noqa: N802
        self, request: pb.RevokeTokenRequest, context: grpc.aio.ServicerContext
    ) -> pb.RevokeTokenReply:
        revoked, _ = await self._coordinator.state.turns.carry(
            self._decided(self._admin.revoke_token(request.id, request.devices))
        )
        return pb.RevokeTokenReply(revoked=revoked)

    async def Revoke(self, request: pb.RevokeRequest, context: grpc.aio.ServicerContext) -> pb.RevokeReply:  # noqa: N802
        _, connected = await self._coordinator.state.turns.carry(self._decided(self._admin.revoke(request.name)))
        return pb.RevokeReply(connected=connected)

    async def _decided(self, decision: Coroutine[Any, Any, T]) -> tuple[T, int]:
        """Carry out a decision, and cut off whom it revokes; return its result, and the number of connected devices."""
        return await decision, await self._wake()

    async def Statistics(self, request: pb.StatisticsQuestion, context: grpc.aio.ServicerContext) -> pb.StatisticsAnswer:  # noqa: N802
        """Ask the connected devices for statistics of their data, and return the sums that may be shown."""
        statistics = await self._coordinator.survey.run(request.columns, request.patience_s)
        return pb.StatisticsAnswer(statistics_json=msgspec.json.encode(statistics))
