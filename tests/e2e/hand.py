"""A device driven by hand: every call of the protocol, in any order and with any bytes."""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

from attune.common.grpc_errors import from_rpc
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.common.pb.federation_pb2_grpc import BlobsStub, FederationStub
from attune.common.plan import Profile
from attune.common.wire.digest import digest_of

CALL_S = 60.0
PROFILE = Profile(kind="tabular", shape=(3,), labels=[0, 1], samples=20, test_samples=5)


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    """Return kind and message of the error that the server named for this call."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    named = from_rpc(error)
    assert named is not None, f"the server named no error: {error!r}"
    return dict(error.trailing_metadata())["attune-error"], str(named)


def kind_of(call: Callable[[], Any]) -> str:
    return refusal(call)[0]


class Caller:
    """Channel to a server, under a root and a credential."""

    def __init__(self, port: int, root_pem: bytes, credential: Credential) -> None:
        options = [*channel_options(root_pem), ("grpc.enable_retries", 0)]
        self.channel = grpc.secure_channel(f"127.0.0.1:{port}", channel_credentials(root_pem, credential), options)
        self.federation: Any = FederationStub(self.channel)
        self.blobs: Any = BlobsStub(self.channel)

    def close(self) -> None:
        self.channel.close()


class Stream:
    """Control stream. The server's messages are kept until they are asked for."""

    def __init__(self, caller: Caller, *first: pb.DeviceMessage) -> None:
        self._said: queue.Queue[pb.DeviceMessage | None] = queue.Queue()
        for message in first:
            self._said.put(message)
        self.call = caller.federation.Connect(iter(self._said.get, None))
        self._heard: queue.Queue[pb.ServerMessage | grpc.RpcError | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            for message in self.call:
                self._heard.put(message)
            self._heard.put(None)
        except grpc.RpcError as error:
            self._heard.put(error)

    def say(self, **message: Any) -> None:
        self._said.put(pb.DeviceMessage(**message))

    def next(self, kind: str) -> Any:
        """Return the next message of this kind, and skip others. Raise the error that the stream ended with."""
        while True:
            message = self._heard.get(timeout=CALL_S)
            if isinstance(message, grpc.RpcError):
                raise message
            assert message is not None, f"the stream ended before a {kind}"
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)

    def end(self) -> None:
        """Wait until the server ends the stream. Raise the error that it ended with."""
        while (message := self._heard.get(timeout=CALL_S)) is not None:
            if isinstance(message, grpc.RpcError):
                raise message

    def end_of_input(self) -> None:
        """Say nothing more. The server reads what was said, and then ends the stream."""
        self._said.put(None)

    def hang_up(self) -> None:
        self._said.put(None)
        self.call.cancel()


class Hand(Caller):
    """Enrolled device."""

    def __init__(self, port: int, token: str, name: str, key: bytes | None = None) -> None:
        parsed = JoinToken.parse(token)
        self.port, self.name, self.key = port, name, key or new_key()
        joining = Caller(port, parsed.trust_anchor_pem(), parsed.bootstrap())
        try:
            request = pb.EnrolRequest(name=name, csr_der=csr_der(self.key, "hand"))
            answer = joining.federation.Enrol(request, timeout=CALL_S, wait_for_ready=True)
        finally:
            joining.close()
        self.ca_pem = answer.ca_pem
        self.credential = Credential(self.key, answer.certificate_pem)
        super().__init__(port, answer.ca_pem, self.credential)

    def connect(self, profile: Profile = PROFILE, encodings: Iterable[str] = ()) -> Stream:
        hello = pb.Hello(protocol=1, software="a hand", profile_json=msgspec.json.encode(profile), encodings=list(encodings))
        return Stream(self, pb.DeviceMessage(hello=hello))

    def download(self, digest: str, offset: int = 0) -> bytes:
        call = self.channel.unary_stream(
            "/attune.v1.Blobs/Download", request_serializer=pb.DownloadRequest.SerializeToString, response_deserializer=None
        )
        return b"".join(call(pb.DownloadRequest(digest=digest, offset=offset), timeout=CALL_S))

    def served(self, order: pb.Order) -> dict[str, dict[str, np.ndarray]]:
        """Return the tensors of every part that the order starts from."""
        return {ref.part: load(self.download(ref.digest)) for ref in order.downloads}

    def upload(self, order_id: str, part: str, frames: Iterable[bytes], digest: str, size: int, offset: int = 0) -> int:
        target = pb.UploadTarget(order_id=order_id, part=part, digest=digest, size=size, offset=offset)
        call = self.channel.stream_unary(
            "/attune.v1.Blobs/Upload", request_serializer=None, response_deserializer=pb.UploadReply.FromString
        )
        reply = call(iter(frames), metadata=(("attune-upload-bin", target.SerializeToString()),), timeout=CALL_S)
        return int(reply.received)

    def send(self, order_id: str, part: str, tensors: Mapping[str, np.ndarray]) -> pb.BlobRef:
        """Upload a whole blob in the right way; its tensors may be right or wrong."""
        data = save(dict(tensors))
        self.upload(order_id, part, [data], digest_of(data), len(data))
        return pb.BlobRef(part=part, digest=digest_of(data), size=len(data))

    def submit(self, order_id: str, parts: Iterable[pb.BlobRef] = (), samples: int = 20, **metrics: Any) -> pb.Receipt:
        update = pb.Update(order_id=order_id, parts=list(parts), samples=samples, metrics_json=json.dumps(metrics).encode())
        return self.federation.Submit(update, timeout=CALL_S)

    def answer(self, order: pb.Order, change: float = 1.0) -> pb.Receipt:
        """Answer an order as a good device does, with every value of every part moved by `change`."""
        served = self.served(order)
        parts = [self.send(order.id, part, moved(served[part], change)) for part in (each.part for each in order.returns)]
        return self.submit(order.id, parts, loss=0.5, accuracy_before=0.5, accuracy_after=0.75, test_samples=5)


def moved(tensors: Mapping[str, np.ndarray], change: float) -> dict[str, np.ndarray]:
    return {name: (tensor + np.float32(change)).astype(tensor.dtype) for name, tensor in tensors.items()}
