"""Incoming frames: batches, and two faults of a peer."""

import asyncio

import grpc
import pytest

from attune.common import aio
from attune.common.errors import LimitExceeded, Stalled
from attune.common.pulse import Pulse
from attune.common.wire.blobs import FRAME_BYTES
from attune.fedserver.rpc import service


class Context:
    """Server's end of an upload: these frames, then silence or the end."""

    def __init__(self, frames, ends):
        self.frames, self.ends = list(frames), ends

    async def read(self):
        if self.frames:
            return self.frames.pop(0)
        if self.ends:
            return grpc.aio.EOF
        return await asyncio.Event().wait()


def batches(frames, ends=True):
    async def scenario():
        context, found = Context(frames, ends), []
        while batch := await service._batch(context, "kiel", Pulse()):
            found.append(batch)
        return found

    return aio.run(scenario())


def test_frames_come_in_batches_and_none_is_lost():
    frames = [bytes([n]) * FRAME_BYTES for n in range(2 * service.BATCH_FRAMES + 1)]
    found = batches(frames)
    assert [len(batch) for batch in found] == [service.BATCH_FRAMES, service.BATCH_FRAMES, 1]
    assert [frame for batch in found for frame in batch] == frames
    assert batches([b"a", b"b"]) == [[b"a"], [b"b"]], "a frame of a slow link waits for no other, for the link may be cut"


def test_an_upload_on_which_nothing_comes_is_stalled_and_its_order_is_not_closed(monkeypatch):
    monkeypatch.setattr(service, "STALL_TIMEOUT_S", 0.05)
    with pytest.raises(Stalled, match="go on at the offset"):
        batches([b"a"], ends=False)


def test_a_frame_over_the_limit_is_refused():
    with pytest.raises(LimitExceeded, match="at most"):
        batches([bytes(FRAME_BYTES + 1)])
