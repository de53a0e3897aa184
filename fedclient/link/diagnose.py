"""Reasons why gRPC said UNAVAILABLE: nobody there, the wrong server, or a certificate that was refused.

gRPC reports all three alike, so one more TLS handshake is made, with Python's own ssl module, and watched.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import tempfile
import time
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from attune.common.errors import AttuneError, CertificateRefused, FingerprintMismatch, TokenRefused, Unreachable
from attune.common.identity.certificates import AUTHORITY
from attune.common.identity.credential import Credential, check_dates, load_key, not_after, server_name, short_form
from attune.common.text import clean
from attune.fedclient.address import ENVIRONMENT, Proxy, ServerAddress

# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_OUT_OF_DATE = (9, 10)
# A server that is killed between two packets closes the connection as a refusal does, but not three times in a row.
_TRIES = 3
LETS_IN = "lets this device in"  # part of the message if the server accepts this device by now
_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME


def now() -> datetime:
    """Return this device's time."""
    return datetime.now(timezone.utc)


class _Closed(Exception):
    """The server closed the connection where a refusal would, without saying why."""


def diagnose(
    host: str,
    port: int,
    root_pem: bytes,
    credential: Credential,
    timeout_s: float,
    *,
    bootstrap: bool = False,
    proxy: Proxy | None = None,
) -> AttuneError:
    """Return the error that explains a failed connection; the caller raises it. This blocks up to `timeout_s`: use a thread.

    Unreachable means that a later try can succeed; any other error stays until somebody acts. With `bootstrap`, the credential
    is a join token's, and a refusal is TokenRefused instead of CertificateRefused. `proxy`: through which the device connects.

    The dates of certificates are final only if both sides agree. Each side judges the other by its own clock, and a clock can
    be set right. gRPC's server closes the connection without a reason if it finds a certificate out of date.
    """
    server, address = ServerAddress(host, port), f"{host}:{port}"
    deadline = time.monotonic() + timeout_s
    stale: CertificateRefused | None = None
    try:
        check_dates(credential.certificate_pem, now())
    except CertificateRefused as error:
        stale = error
    try:
        # Mostly no server answers, and a fleet diagnoses once for each device: so what costs processor time comes after this.
        plain = _reach(server, proxy, deadline)
        context = _context(root_pem, credential)
        if stale is not None:
            context.verify_flags |= _NO_CHECK_TIME
        for left in reversed(range(_TRIES)):
            with plain:
                try:
                    answer = _probe(plain, address, context, root_pem, deadline, bootstrap)
                    if proxy is not None and isinstance(answer, FingerprintMismatch):
                        answer = _opened(_reach(server, proxy, deadline), proxy, address) or answer
                    return answer if stale is None else _judged_stale(answer, stale, address)
                except _Closed:
                    if not left:
                        break
            plain = _reach(server, proxy, deadline)
    except Unreachable as error:
        return error if stale is None else Unreachable(f"{error} And by this device's clock: {stale}")
    if stale is not None:
        return stale
    if not bootstrap and credential.issued_by(root_pem):  # so the server can dislike nothing but the dates
        return Unreachable(
            f"The server at {address} closed the connection, although this device's certificate is of its federation and valid "
            f"until {not_after(credential.certificate_pem):%Y-%m-%d %H:%M} UTC (it is {now():%Y-%m-%d %H:%M} here). "
            "Is the server's clock wrong, or this device's?"
        )
    return _refusal(address, "it closed the connection", bootstrap)


def _judged_stale(answer: AttuneError, stale: CertificateRefused, address: str) -> AttuneError:
    """Return the error for a certificate that is out of date by this device's clock, after the server gave this answer."""
    if isinstance(answer, CertificateRefused):
        return stale
    if isinstance(answer, Unreachable) and LETS_IN in str(answer):
        return Unreachable(
            f"The server at {address} accepts this device's certificate, which is out of date by this device's clock (it is "
            f"{now():%Y-%m-%d %H:%M} UTC here). Set this device's clock, or the server's."
        )
    return answer


def _reach(server: ServerAddress, proxy: Proxy | None, deadline: float) -> socket.socket:
    """Open a TCP connection.

    Raises:
        Unreachable: No server answers.
    """
    host, port, direct = server.host, server.port, _no_proxy(server.host)
    if proxy is not None:
        return proxy.connect(server, _left_s(deadline))
    try:
        return socket.create_connection((host, port), timeout=_left_s(deadline))
    except (socket.gaierror, UnicodeError) as error:
        raise Unreachable(f"The name of the server, {host!r}, cannot be resolved ({error}). Check --server.{direct}") from None
    except ConnectionRefusedError:
        raise Unreachable(f"Nobody listens at {host}:{port}. Is the server running, and is this its port?{direct}") from None
    except OSError as error:
        raise Unreachable(
            f"{host}:{port} cannot be reached ({error}). Check the address, the network and firewalls.{direct}"
        ) from None


def _no_proxy(host: str) -> str:
    """Return a sentence about a proxy that the environment names for this host, and that is not used; else nothing."""
    proxy = next((name for name in ENVIRONMENT if name in urllib.request.getproxies_environment()), None)
    if proxy is None or urllib.request.proxy_bypass(host):
        return ""
    return f" {proxy}_proxy is set, but devices connect directly and use no proxy without --proxy env."


def _opened(plain: socket.socket, proxy: Proxy, address: str) -> FingerprintMismatch | None:
    """Return the error for a proxy that puts a certificate of its own in the place of the server's; None if it does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the certificate is looked at, and nothing is sent
    try:
        with plain, context.wrap_socket(plain) as secure:
            issuer = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"").issuer
    except (OSError, ValueError):
        return None
    if issuer == AUTHORITY:
        return None  # another federation's server
    return FingerprintMismatch(
        f"The proxy {proxy} opens TLS: in the place of the server at {address} it shows a certificate of "
        f"{clean(issuer.rfc4514_string())!r}. Device and server must see each other's certificates: have it let {address} "
        "through unopened. Nothing was sent."
    )


def _context(root_pem: bytes, credential: Credential) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # In 1.2 a refusal comes within the handshake, where it looks like a proxy whose server is down.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=root_pem.decode())
    context.set_alpn_protocols(["h2"])
    # Python's ssl reads keys from files only; the password lives in memory alone, so the file gives nothing away.
    password = secrets.token_bytes(32).hex().encode()
    key = load_key(credential.key_pem)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "credential.pem"
        path.write_bytes(locked + credential.certificate_pem)
        context.load_cert_chain(path, password=password)
    return context


def _probe(
    plain: socket.socket, address: str, context: ssl.SSLContext, root_pem: bytes, deadline: float, bootstrap: bool
) -> AttuneError:
    try:
        plain.settimeout(_left_s(deadline))
        with context.wrap_socket(plain, server_hostname=server_name(root_pem)) as secure:
            return _listen(secure, address, deadline)
    except TimeoutError:
        return Unreachable(f"{address} accepts connections but does not answer. The server may be overloaded or hung.")
    except ssl.SSLCertVerificationError as error:
        return _wrong_server(address, root_pem, error)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError):
        return Unreachable(f"{address} closes connections before it says who it is. Is there a proxy whose server is down?")
    except ssl.SSLError as error:
        if "ALERT" in (error.reason or ""):
            return _refusal(address, str(error.reason).lower().replace("_", " "), bootstrap)
        return Unreachable(f"What answers at {address} does not speak TLS ({error.reason}). Is this the server's port?")


def _listen(secure: ssl.SSLSocket, address: str, deadline: float) -> AttuneError:
    # In TLS 1.3 our side of the handshake ends before the server has judged our certificate. A gRPC server that lets us in
    # speaks first (HTTP/2 settings), so the first byte, or its absence, is the verdict.
    secure.settimeout(_left_s(deadline))
    try:
        verdict = secure.recv(1)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
        raise _Closed from error
    if not verdict:
        raise _Closed
    return Unreachable(f"{address} broke the connection off but is there again, and {LETS_IN}.")


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _refusal(address: str, how: str, bootstrap: bool) -> AttuneError:
    if bootstrap:
        return TokenRefused(
            f"The server at {address} refused the join token ({how}): it is unknown there, or expired long ago. "
            "Ask the operator for a new one (fedserver token)."
        )
    return CertificateRefused(
        f"The server at {address} refused this device's certificate ({how}). If the server was set up anew, "
        "ask its operator for a token and run fedclient join with a new --home."
    )


def _wrong_server(address: str, root_pem: bytes, error: ssl.SSLCertVerificationError) -> AttuneError:
    if error.verify_code in _OUT_OF_DATE:
        return Unreachable(
            f"The certificate of the server at {address} is out of date ({error.verify_message}; it is "
            f"{now():%Y-%m-%d %H:%M} UTC here). Check this device's clock and the server's, or have the server restarted."
        )
    return FingerprintMismatch(
        f"The server at {address} does not belong to the federation this device trusts ({error.verify_message}). Nothing was "
        f"sent to it. Expected the authority {short_form(root_pem)}: check --server, or ask the operator for a new token."
    )
