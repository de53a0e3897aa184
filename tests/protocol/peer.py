"""A device as it was when version 1 was frozen: it knows the recorded descriptors (v1.binpb) and docs/protocol.md.

Its messages and calls come from the record, not from generated code. Every constant of the protocol (service names, the
metadata key, the form of a digest, the TLS name, the keys of profile and metrics) is repeated here on purpose: our changes must
not change this peer. The join token is parsed by `attune.common.identity`; tests/common/identity compares its derivation with a
recorded value.
"""

import hashlib
import json
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID
from google.protobuf import descriptor_pool, message_factory
from safetensors.numpy import load, save

from attune.common.identity.token import JoinToken
from tests.protocol.record import load as load_record

CALL_S = 60.0
FRAME = 1 << 20
PROFILE = {"kind": "tabular", "shape": [3], "labels": [0, 1], "samples": 20, "test_samples": 5}


class Contract:
    """Messages and calls by name, from the record."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        for file in load_record().file:
            self._pool.Add(file)

    def message(self, name: str, /, **fields: Any) -> Any:
        return self.type(name)(**fields)

    def type(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"attune.v1.{name}"))

    def value(self, name: str) -> int:
        """Return the number of an enum value, such as `Work.WORK_TRAIN`."""
        enum, _, value = name.rpartition(".")
        return int(self._pool.FindEnumTypeByName(f"attune.v1.{enum}").values_by_name[value].number)

    def call(self, channel: grpc.Channel, service: str, name: str) -> Any:
        """Return a call as the record has it. A Frame is raw bytes, not a message."""
        found = self._pool.FindServiceByName(f"attune.v1.{service}").methods_by_name[name]
        ways = {(False, False): "unary_unary", (False, True): "unary_stream", (True, False): "stream_unary"}
        make = getattr(channel, ways.get((found.client_streaming, found.server_streaming), "stream_stream"))
        request, answer = (message_factory.GetMessageClass(kind) for kind in (found.input_type, found.output_type))
        return make(
            f"/attune.v1.{service}/{name}",
            request_serializer=None if found.input_type.name == "Frame" else request.SerializeToString,
            response_deserializer=None if found.output_type.name == "Frame" else answer.FromString,
        )


class Peer:
    """Enrolled device with its control stream."""

    def __init__(self, port: int, token: str, name: str) -> None:
        self.contract, self.name = Contract(), name
        key = ec.generate_private_key(ec.SECP256R1())
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        request = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA256())
        parsed = JoinToken.parse(token)
        bootstrap = parsed.bootstrap()
        joining = open_channel(port, parsed.trust_anchor_pem(), bootstrap.key_pem, bootstrap.certificate_pem)
        enrol = self.contract.call(joining, "Federation", "Enrol")
        asked = self.contract.message("EnrolRequest", name=name, csr_der=request.public_bytes(Encoding.DER))
        self.certificate = enrol(asked, timeout=CALL_S, wait_for_ready=True)
        joining.close()
        self.channel = open_channel(port, self.certificate.ca_pem, key_pem, self.certificate.certificate_pem)
        self._said: queue.Queue[Any] = queue.Queue()
        self._heard: queue.Queue[Any] = queue.Queue()

    def connect(self) -> None:
        """Open the control stream, and say Hello."""
        hello = self.contract.message("Hello", protocol=1, software="recorded", profile_json=json.dumps(PROFILE).encode())
        self._said.put(self.contract.message("DeviceMessage", hello=hello))
        answers = self.contract.call(self.channel, "Federation", "Connect")(iter(self._said.get, None))
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def _listen(self, answers: Iterable[Any]) -> None:
        try:
            for message in answers:
                self._heard.put(message)
        except grpc.RpcError as error:
            self._heard.put(error)

    def next(self) -> tuple[str, Any]:
        """Return kind and content of the next message, or raise the stream's error. Unknown kinds are ignored, as agreed."""
        while True:
            message = self._heard.get(timeout=CALL_S)
            if isinstance(message, grpc.RpcError):
                raise message
            if (kind := message.WhichOneof("message")) not in (None, "beat"):  # a beat only shows that the server lives
                return kind, getattr(message, kind)

    def progress(self, order: Any) -> None:
        progress = self.contract.message("Progress", order_id=order.id, done=0.5)
        self._said.put(self.contract.message("DeviceMessage", progress=progress))

    def download(self, ref: Any) -> dict[str, np.ndarray]:
        """Download the tensors of a part, and check size and digest."""
        asked = self.contract.message("DownloadRequest", digest=ref.digest, offset=0)
        data = b"".join(self.contract.call(self.channel, "Blobs", "Download")(asked, timeout=CALL_S))
        assert (len(data), digest(data), ref.encoding) == (ref.size, ref.digest, "")
        return dict(load(data))

    def upload(self, order: Any, part: str, tensors: dict[str, np.ndarray], version: int) -> Any:
        """Upload a part in two streams, the second from where the server says that the first ended. Return its BlobRef."""
        data = save(tensors)
        half = len(data) // 2
        target = {"order_id": order.id, "part": part, "digest": digest(data), "size": len(data)}
        try:
            self._send(target, data[:half], 0)
        except grpc.RpcError as error:  # an incomplete blob: the received bytes stay
            assert ("attune-error", "truncated") in [tuple(pair) for pair in error.trailing_metadata()]
        reached = self.contract.call(self.channel, "Blobs", "UploadOffset")
        offset = reached(self.contract.message("UploadTarget", **target), timeout=CALL_S).offset
        assert offset == half
        assert self._send(target, data[offset:], offset).received == len(data)
        return self.contract.message("BlobRef", part=part, digest=digest(data), size=len(data), version=version)

    def _send(self, target: dict[str, Any], data: bytes, offset: int) -> Any:
        announced = self.contract.message("UploadTarget", **target, offset=offset).SerializeToString()
        frames = (data[start : start + FRAME] for start in range(0, len(data), FRAME))
        call = self.contract.call(self.channel, "Blobs", "Upload")
        return call(frames, metadata=(("attune-upload-bin", announced),), timeout=CALL_S)

    def submit(self, order: Any, parts: list[Any], metrics: dict[str, Any]) -> int:
        """Submit an update, and return the status of the receipt."""
        update = self.contract.message(
            "Update", order_id=order.id, parts=parts, samples=20, metrics_json=json.dumps(metrics).encode()
        )
        return int(self.contract.call(self.channel, "Federation", "Submit")(update, timeout=CALL_S).status)

    def orders(self) -> Iterator[Any]:
        """Yield orders as they come, to the end of the federation."""
        while (heard := self.next())[0] != "finish":
            if heard[0] == "order":
                yield heard[1]

    def close(self) -> None:
        self._said.put(None)
        self.channel.close()


def open_channel(port: int, root_pem: bytes, key_pem: bytes, certificate_pem: bytes) -> grpc.Channel:
    """Open mutual TLS to the server under this authority, by the name that follows from the authority's key."""
    public = x509.load_pem_x509_certificate(root_pem).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    name = f"{hashlib.sha256(public).hexdigest()[:32]}.attune"
    credentials = grpc.ssl_channel_credentials(root_pem, key_pem, certificate_pem)
    options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options)


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
