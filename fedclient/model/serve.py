"""`fedclient serve`: the finished model's predictions over HTTP, on this machine, without server and federation."""

from __future__ import annotations

import hmac
import ipaddress
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from attune.common.errors import AttuneError, PortInUse, SettingError
from attune.common.task import TASKS
from attune.fedclient.model.artifact import Model

MAX_BODY_BYTES = 16 << 20
MAX_SAMPLES = 4096  # of one request
LOCAL = "127.0.0.1"
IN_FLIGHT = 32  # connections at a time; more are answered 503


@dataclass(frozen=True)
class Place:
    """Where it listens. token: what callers must know; needed where others than this machine can call."""

    host: str = LOCAL
    port: int = 8000
    token: str = ""

    def check(self) -> None:
        """Errors: SettingError where strangers could ask without a token."""
        if not self.local and not self.token:
            raise SettingError(
                f"{self.host} can be reached from other machines: give --token-file with a secret that callers send as "
                "`Authorization: Bearer SECRET`, or leave --host out"
            )

    @property
    def local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def app_of(model: Model, place: Place = Place()) -> Starlette:
    """GET /healthz, GET /model, POST /predict."""
    one_at_a_time = threading.Lock()

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def described(request: Request) -> Response:
        return _refused(request, place.token) or JSONResponse(describe(model))

    async def predict(request: Request) -> Response:
        if refusal := _refused(request, place.token):
            return refusal
        if not request.headers.get("content-type", "").startswith("application/json"):  # no form of a foreign page
            return _problem(415, 'send JSON: {"x": [...]} with the header content-type: application/json')
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=400)
        if body is None:
            return _problem(413, f"a request may have {MAX_BODY_BYTES} bytes: send fewer samples at a time")

        def work() -> dict[str, Any]:
            with one_at_a_time:
                return answer(model, body)

        try:
            return JSONResponse(await run_in_threadpool(work))
        except AttuneError as error:
            return _problem(422, str(error))

    routes = [Route("/healthz", healthz), Route("/model", described), Route("/predict", predict, methods=["POST"])]
    # On this machine alone no page of a stranger may come in by a name that points here.
    hosts = ["localhost", "127.0.0.1", "[::1]"] if place.local else ["*"]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


def describe(model: Model) -> dict[str, Any]:
    """What /model answers: what the model takes, and what it says."""
    info = model.info
    return {
        "name": info.name, "method": info.method, "model": info.title, "kind": info.model.kind, "shape": list(info.model.shape),
        "columns": list(info.column_names), "classes": list(info.classes), "accuracy": info.accuracy, "round": info.round,
        "task": info.task, "metric": TASKS[info.task].described,
    }  # fmt: skip


def answer(model: Model, body: bytes) -> dict[str, Any]:
    """What /predict answers to a JSON object with the samples as `x`. Errors: SettingError, and those of `Model.predict`."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise SettingError("the request is not JSON") from None
    if not isinstance(given, dict) or not isinstance(given.get("x"), list):
        raise SettingError('the request must be an object with the samples as a list: {"x": [...]}')
    if not 0 < len(given["x"]) <= MAX_SAMPLES:
        raise SettingError(f"a request has 1 to {MAX_SAMPLES} samples, not {len(given['x'])}")
    tokens = model.info.model.kind == "tokens"
    try:
        x = np.array(given["x"], dtype=np.int64 if tokens else np.float32)
    except (ValueError, TypeError, OverflowError):
        raise SettingError("the samples are not numbers, or are not all of one shape") from None
    return {"labels": model.predict(x, "the request")}


async def _body(request: Request) -> bytes | None:
    """None where it is too long; no more than that is ever read."""
    found = bytearray()
    async for piece in request.stream():
        found += piece
        if len(found) > MAX_BODY_BYTES:
            return None
    return bytes(found)


def _refused(request: Request, token: str) -> Response | None:
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if not token or (kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())):
        return None
    return PlainTextResponse("send the token as `Authorization: Bearer TOKEN`\n", 401, {"www-authenticate": "Bearer"})


def _problem(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)


def serve(model: Model, place: Place, say: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM. Errors: SettingError, PortInUse."""
    import socket

    import uvicorn

    place.check()
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        listener = socket.create_server((place.host, place.port), family=family)
    except OSError as error:
        raise PortInUse(
            f"cannot listen on {place.host}:{place.port} ({error.strerror or error}): choose another --port"
        ) from None
    config = uvicorn.Config(
        app_of(model, place), http="h11", ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, limit_concurrency=IN_FLIGHT, timeout_keep_alive=10, timeout_graceful_shutdown=5,
    )  # fmt: skip
    say(f"predicting with {model.info.title} of {model.info.name} on http://{place.host}:{listener.getsockname()[1]}")
    uvicorn.Server(config).run([listener])
