"""Whole examples to begin with, so that a fuzzer need not discover the form of a certificate request by chance."""

import msgspec
import numpy as np
from safetensors.numpy import save

from attune.common.identity.credential import csr_der, new_key
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from tests.fuzz.targets import AUTHORITY, MESSAGES, WHO

DIGEST = f"sha256:{'0' * 64}"


def _messages() -> list[bytes]:
    key = new_key()
    profile = msgspec.json.encode({"kind": "tabular", "shape": [3], "labels": [0, 1], "samples": 20, "test_samples": 5})
    hello = pb.Hello(protocol=1, software="a hand", profile_json=profile)
    ref = pb.BlobRef(part="shared", digest=DIGEST, size=9)
    order = pb.Order(id=f"train-1-{WHO}", round=1, work=pb.WORK_TRAIN, returns=[pb.Return(part="shared")], downloads=[ref])
    update = pb.Update(order_id=f"train-1-{WHO}", parts=[ref], samples=20, metrics_json=b'{"loss": 0.5, "test_samples": 5}')
    examples = (
        pb.DeviceMessage(hello=hello),
        pb.DeviceMessage(progress=pb.Progress(order_id=f"train-1-{WHO}", done=0.5)),
        pb.DeviceMessage(trouble=pb.Trouble(order_id=f"train-1-{WHO}", reason="\x1b[2J[/bold]\n")),
        update,
        pb.UploadTarget(order_id=f"train-1-{WHO}", part="shared", digest=DIGEST, size=9),
        pb.EnrolRequest(name=WHO, csr_der=csr_der(key, WHO)),
        pb.RenewRequest(csr_der=csr_der(key, WHO)),
        hello,
        pb.ServerMessage(order=order),
        pb.ServerMessage(notice=pb.Notice(text="hello")),
        pb.Receipt(status=pb.Receipt.STATUS_LATE, message="late"),
    )
    place = {kind: number for number, (kind, _) in enumerate(MESSAGES)}
    return [bytes([place[type(each)]]) + each.SerializeToString() for each in examples]


def seeds(target: str) -> list[bytes]:
    match target:
        case "header":
            arrays = {"w": np.zeros((2, 3), "f4"), "n": np.zeros((), "i8"), "b": np.zeros((0, 4), "f2")}
            return [save({}), save(arrays), save(arrays, {"made": "by"})]
        case "token":
            return [JoinToken.new(AUTHORITY.public_key_compressed).encode().encode(), b"A" * 76, b" -_\n"]
        case "csr":
            return [csr_der(new_key(), WHO)]
    return _messages()
