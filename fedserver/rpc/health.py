"""Standard health service with limits, so that a slow watcher holds up no other call; and the watchdog that it follows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from attune.common.errors import TooMany
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.rpc.auth import caller

WATCHES_A_CALLER, WATCHES = 2, 256


class Health(HealthServicer):  # type: ignore[misc]
    """Health of the whole server (the service ""). There are no other services."""

    def __init__(self) -> None:
        self._status = pb.HealthCheckResponse.SERVING
        self._changed = asyncio.Event()
        self._watches: Counter[str] = Counter()

    def set(self, serving: bool) -> None:
        self._status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:  # noqa: N802
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=self._status)

    async def Watch(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.HealthCheckResponse]:
        """Yield the present status, then each change that there is time for.

        Raises:
            TooMany: The caller, or all callers together, watch too often.
        """
        who = caller().fingerprint
        if self._watches[who] >= WATCHES_A_CALLER or self._watches.total() >= WATCHES:
            raise TooMany(f"{caller().name} watches the health of this server {WATCHES_A_CALLER} times already, or too many do")
        self._watches[who] += 1
        try:
            said = None
            while True:
                changed, now = self._changed, self._status
                if request.service:
                    now = pb.HealthCheckResponse.SERVICE_UNKNOWN
                if now != said:
                    yield pb.HealthCheckResponse(status=now)
                    said = now
                await changed.wait()
        finally:
            self._watches[who] -= 1
            if not self._watches[who]:
                del self._watches[who]


WATCHDOG = "watchdog"  # the name of a trouble
LOOKS = 4  # in the span that it allows


async def watch(coordinator: Coordinator, limit_s: float, tell: Callable[[bool], None]) -> None:
    """Call `tell` with False when a step makes no progress for `limit_s`, and with True when it does again. This never ends."""
    healthy = True
    while True:
        await asyncio.sleep(limit_s / LOOKS)
        stuck_s = coordinator.stuck_s
        if stuck_s >= limit_s:
            phase = coordinator.state.round.record.phase
            coordinator.state.troubles.set(WATCHDOG, f"the step {phase} has made no headway for {limit_s:.0f} s or longer")
        else:
            coordinator.state.troubles.clear(WATCHDOG)
        if healthy != (stuck_s < limit_s):
            healthy = not healthy
            tell(healthy)
