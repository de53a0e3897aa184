"""False updates in encodings with fewer bytes: each is refused by name, and the server goes on."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from attune.common.exchange.encodings import decoded
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.pb import federation_pb2 as pb
from attune.common.protocol import ENCODINGS
from attune.common.wire.planes import packed
from attune.common.wire.tensors import manifest_of
from benchmarks.usage import status_bytes
from tests.attacks.table import answer_to
from tests.e2e.hand import Hand
from tests.e2e.harness import Federation, FederationAt

Tensors = dict[str, np.ndarray]
WIDTH = 16384  # so that a bomb is smaller than the largest tensor
FLAGS = (
    "--method", "fedavg", "--model", "dnn", "--set", f"model.hidden=[{WIDTH}]", "--min-clients", "2", "--rounds", "3",
    "--set", "round.stall_s=0",
)  # fmt: skip
SCALES = "#scales"
BOMB_BYTES = 1 << 30  # bytes after unpacking; 32 KB before


class Eve:
    """Device of a federation that asks for one encoding, with its first order."""

    def __init__(self, federation: Federation, encoding: str) -> None:
        self.encoding = encoding
        self.server = federation.server(*FLAGS, "--set", f"round.encoding={encoding}")
        self.hands = [Hand(self.server.port, self.server.join_token, name) for name in ("ada", "eve")]
        self.streams = [hand.connect(encodings=ENCODINGS) for hand in self.hands]
        self.order = [stream.next("order") for stream in self.streams][1]
        self.served = self._served()

    def _served(self) -> Tensors:
        [ref] = self.order.downloads
        tensors = {name: torch.from_numpy(each.copy()) for name, each in self.hands[1].served(self.order)["shared"].items()}
        if ref.encoding:
            manifest = manifest_of(tensors_of(build(default_spec("tabular", (3,), 2, 0, "dnn", {"hidden": [WIDTH]}), 0)))
            tensors = dict(decoded(tensors, manifest_of(tensors), ref.encoding, manifest, None, "the server"))
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    def handing_in(self, tensors: Tensors, encoding: str | None = None) -> str:
        """Return the server's answer to an update with these tensors."""
        ref = self.hands[1].send(self.order.id, "shared", tensors)
        ref.encoding = self.encoding if encoding is None else encoding
        found = answer_to(lambda: self.hands[1].submit(self.order.id, [ref]))
        assert self.server.popen.poll() is None and "Traceback" not in self.server.text
        return found


@pytest.fixture(scope="module")
def eve(federation_at: FederationAt) -> Eve:
    return Eve(federation_at("int8"), "int8")


def changes(eve: Eve, value: int = 1, scale: float = 1e-3) -> Tensors:
    """Return a right update with the same change everywhere."""
    blocks = sum(-(-tensor.size // 256) for tensor in eve.served.values())
    return {name: np.full(tensor.shape, value, "i1") for name, tensor in eve.served.items()} | {
        SCALES: np.full(blocks, scale, "f4")
    }


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "answer"),
    [
        (lambda own: own | {SCALES: np.full_like(own[SCALES], np.nan)}, "bad-scale"),
        (lambda own: own | {SCALES: np.full_like(own[SCALES], np.inf)}, "bad-scale"),
        (lambda own: own | {SCALES: np.full_like(own[SCALES], -1e-3)}, "bad-scale"),
        (
            lambda own: (
                {name: np.full_like(tensor, 127) for name, tensor in own.items()} | {SCALES: np.full_like(own[SCALES], 1e38)}
            ),
            "not-finite",
        ),
        (lambda own: own | {SCALES: own[SCALES][:-1]}, "wrong-shape"),
        (lambda own: own | {SCALES: np.concatenate([own[SCALES]] * 2)}, "wrong-shape"),
        (lambda own: own | {SCALES: own[SCALES].astype("f8")}, "wrong-dtype"),
        (lambda own: without(own, SCALES), "missing-tensor"),
        (lambda own: without(own, min(own.keys() - {SCALES})), "missing-tensor"),
        (lambda own: own | {"more": np.zeros(1, "i1")}, "unexpected-tensor"),
        (lambda own: {name: tensor.astype("f4") for name, tensor in own.items()}, "wrong-dtype"),
        (lambda own: {name: tensor[..., :-1].copy() for name, tensor in own.items()}, "wrong-shape"),
    ],
    ids=["nan", "infinite", "negative", "1e38", "too-few", "too-many", "wide", "none", "lacks", "more", "plain", "short"],
)
def test_int8_that_is_none_is_refused(eve: Eve, spoil: Callable[[Tensors], Tensors], answer: str) -> None:
    assert eve.handing_in(spoil(changes(eve))) == answer


def test_then_a_right_one_is_taken(eve: Eve) -> None:
    ref = eve.hands[1].send(eve.order.id, "shared", changes(eve))
    ref.encoding = "int8"
    assert eve.hands[1].submit(eve.order.id, [ref]).status == pb.Receipt.STATUS_ACCEPTED


# --- compressed without loss


@pytest.fixture(scope="module")
def packing(federation_at: FederationAt) -> Eve:
    if "zstd" not in ENCODINGS:
        pytest.skip("needs the extra zstd")
    return Eve(federation_at("zstd"), "zstd")


def frames(*each: bytes) -> np.ndarray:
    data = b"".join(len(frame).to_bytes(4, "little") for frame in each) + b"".join(each)
    return np.frombuffer(data, "u1")


def in_place_of_the_largest(eve: Eve, bomb: np.ndarray) -> str:
    """Return the answer to an update with this tensor in place of its largest one."""
    name = max(eve.served, key=lambda name: eve.served[name].size)
    assert bomb.size < eve.served[name].nbytes
    return eve.handing_in(eve.served | {name: bomb})


def test_a_bomb_is_refused_before_it_goes_off(packing: Eve) -> None:
    """Send a gigabyte of zeros in 32 KB per frame, and a frame that lies about it: the server's memory does not grow."""
    import zstandard

    stream = zstandard.ZstdCompressor().compressobj(size=BOMB_BYTES)
    honest = b"".join(stream.compress(bytes(1 << 20)) for _ in range(BOMB_BYTES >> 20)) + stream.flush()
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
    before = status_bytes(packing.server.popen.pid, "VmHWM")
    answers = {in_place_of_the_largest(packing, frames(*[bomb] * 4)) for bomb in (honest, silent)}
    assert answers == {"bad-frame"}
    assert status_bytes(packing.server.popen.pid, "VmHWM") - before < BOMB_BYTES / 8


@pytest.mark.parametrize("bomb", [np.zeros(0, "u1"), np.full(16, 255, "u1"), frames(b"", b"", b"", b"")], ids=str)
def test_what_is_no_frame_is_refused(packing: Eve, bomb: np.ndarray) -> None:
    assert in_place_of_the_largest(packing, bomb) == "bad-frame"


def test_a_packed_nan_is_found(packing: Eve) -> None:
    name = max(packing.served, key=lambda name: packing.served[name].size)
    spoilt = torch.full(packing.served[name].shape, math.nan)
    bytes_of_it = packed(spoilt, torch.from_numpy(packing.served[name].copy())).numpy()
    assert packing.handing_in(packing.served | {name: bytes_of_it}) == "not-finite"


def test_plain_tensors_are_a_right_update_too(packing: Eve) -> None:
    ref = packing.hands[1].send(packing.order.id, "shared", packing.served)
    ref.encoding = "zstd"
    assert packing.hands[1].submit(packing.order.id, [ref]).status == pb.Receipt.STATUS_ACCEPTED
