"""A server survives devices that connect all at once, also while its trust roots change.

The server is a process of its own, because gRPC's core might crash (grpc issue 36693).
"""

import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attune.common.identity.credential import server_name
from attune.fedserver.identity.authority import Authority

HANDSHAKES, THREADS = 600, 8
SERVER = """
import asyncio, sys
from pathlib import Path
import grpc.aio
from attune.common import aio
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials, server_options

async def main():
    authority, other = (Authority.load(Path(folder)) for folder in sys.argv[1:])
    live = LiveServerCredentials([authority.certificate_pem], authority.issue_server())
    server, shown = grpc.aio.server(options=server_options()), authority.issue_server()
    print(server.add_secure_port("127.0.0.1:0", live.credentials), flush=True)
    await server.start()
    async def change():
        more = [other.certificate_pem]
        while True:
            await asyncio.sleep(0.2)
            live.update([authority.certificate_pem, *more], shown)
            more = [] if more else [other.certificate_pem]
    changing = asyncio.ensure_future(change())
    await asyncio.to_thread(sys.stdin.read)
    changing.cancel()
    await server.stop(0)

aio.run(main())
"""


def test_a_server_outlives_many_handshakes_at_once(device: Any, tmp_path: Path) -> None:
    folders = [tmp_path / "ours", tmp_path / "theirs"]
    authority, _ = (Authority.create(folder) for folder in folders)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.certificate_pem.decode())
    context.load_cert_chain(device(authority).save(tmp_path))
    context.set_alpn_protocols(["h2"])
    command = [sys.executable, "-c", SERVER, *map(str, folders)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin and server.stdout
        port = int(server.stdout.readline())

        def shake(_: int) -> bool:
            try:
                plain = socket.create_connection(("127.0.0.1", port), timeout=30)
                with plain, context.wrap_socket(plain, server_hostname=server_name(authority.certificate_pem)):
                    return True
            except OSError:
                return False

        with ThreadPoolExecutor(THREADS) as pool:
            done = sum(pool.map(shake, range(HANDSHAKES)))
        server.stdin.close()
        assert server.wait(30) == 0
        assert done == HANDSHAKES
