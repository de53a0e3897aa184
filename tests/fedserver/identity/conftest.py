"""A mutual-TLS gRPC server on a free port that tells each caller its fingerprint, and calls to it."""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials, peer_fingerprint, server_options

METHOD = "/attune.test.Identity/Who"


class Served:
    """Running server: its port, and the fingerprints of all callers whose call reached it."""

    def __init__(self) -> None:
        self.port = 0
        self.callers: list[str] = []

    async def who(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.callers.append(peer_fingerprint(context.auth_context()))
        return self.callers[-1].encode()


@asynccontextmanager
async def _serve(live: LiveServerCredentials) -> AsyncIterator[Served]:
    served = Served()
    server = grpc.aio.server(options=server_options())
    handler = grpc.unary_unary_rpc_method_handler(served.who)
    service, method = METHOD.strip("/").split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    served.port = server.add_secure_port("127.0.0.1:0", live.credentials)
    await server.start()
    try:
        yield served
    finally:
        await server.stop(None)


async def _call(port: int, root_pem: bytes, credential: Credential | None) -> str:
    trust = grpc.ssl_channel_credentials(root_pem) if credential is None else channel_credentials(root_pem, credential)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trust, options=channel_options(root_pem)) as channel:
        reply: bytes = await channel.unary_unary(METHOD)(b"", timeout=10)
        return reply.decode()


@pytest.fixture
def serve() -> Callable[[LiveServerCredentials], AbstractAsyncContextManager[Served]]:
    return _serve


@pytest.fixture
def call() -> Callable[[int, bytes, Credential | None], Coroutine[None, None, str]]:
    """Return a function that calls a server under `root_pem`, with or without a certificate, and returns the answer."""
    return _call


@pytest.fixture
def refused(call: Callable[..., Coroutine[None, None, str]]) -> Callable[..., Coroutine[None, None, bool]]:
    """Return whether a connection under `root_pem` with `credential` ends before any call gets through."""

    async def attempt(port: int, root_pem: bytes, credential: Credential) -> bool:
        try:
            await call(port, root_pem, credential)
        except grpc.aio.AioRpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            return True
        return False

    return attempt


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Make another federation's authority: the same subject, another key."""
    return Authority.create(tmp_path_factory.mktemp("theirs"))


def _device(authority: Authority, name: str = "pi", days: float = 30, **options: object) -> Credential:
    key = new_key()
    return Credential(key, authority.issue_device(csr_der(key, name), name, days, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def device() -> Callable[..., Credential]:
    """Return a function that enrols a device as the server does: `device(authority, name, days, now=...)`."""
    return _device


@pytest.fixture
def live(authority: Authority) -> LiveServerCredentials:
    return LiveServerCredentials([authority.certificate_pem], authority.issue_server())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"
