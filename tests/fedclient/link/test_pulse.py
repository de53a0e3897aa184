"""Liveness: silence in one's own ticks, the pace of frames, and a server that freezes behind an open connection."""

import asyncio
import time

import pytest

from attune.common import aio
from attune.common.pulse import BUSY_TICKS, IDLE_TICKS, Pulse
from attune.common.wire.blobs import FIRST_BYTES, FRAME_BYTES, LEAST_BYTES, Pace, paced_frames
from attune.fedclient.link.port import Broken
from tests.fedclient.link.server import OverGrpc, Scripted
from tests.fedclient.link.test_conformance import DATA, stream, until


def ticks(pulse):
    """Count the ticks until the other side counts as gone."""
    count = 1
    while not pulse.tick():
        count += 1
    return count


def test_silence_ends_a_pulse_and_any_byte_begins_it_anew():
    pulse = Pulse()
    assert ticks(pulse) == IDLE_TICKS + 1
    pulse.heard()
    assert ticks(pulse) == IDLE_TICKS + 1


def test_a_transfer_gives_silence_more_time_for_as_long_as_it_lasts():
    pulse = Pulse()
    with pulse.transfer(), pulse.transfer():
        assert ticks(pulse) == BUSY_TICKS + 1
    pulse.heard()
    assert ticks(pulse) == IDLE_TICKS + 1


async def test_a_process_that_was_stopped_itself_does_not_blame_the_other():
    """Count the time between two ticks, however long, as one tick."""
    pulse, gone = Pulse(), asyncio.Event()
    pulse.set_pace(0.4)
    watching = asyncio.create_task(pulse.watch(lambda: None, gone.set))
    await asyncio.sleep(0)
    time.sleep(2.0)  # noqa: ASYNC251 (a whole process is stopped, for more than twice the pace)
    await asyncio.sleep(0.05)
    assert not gone.is_set()
    async with aio.timeout(10):
        await gone.wait()
    await watching


def test_a_frame_is_a_quarter_of_a_second_of_the_link():
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert pace.frame_bytes() == FIRST_BYTES
    now[0] = 1.0
    pace.sent(200_000)
    assert pace.frame_bytes() == 50_000
    now[0] = 1000.0
    assert pace.frame_bytes() == LEAST_BYTES
    pace.sent(100 << 30)
    assert pace.frame_bytes() == FRAME_BYTES


def test_paced_frames_are_the_file(tmp_path):
    (tmp_path / "blob").write_bytes(DATA * 40)
    frames = list(paced_frames(tmp_path / "blob", 7))
    assert b"".join(frames) == (DATA * 40)[7:]
    assert len(frames[0]) == FIRST_BYTES


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a stuck transfer"])
def test_a_silent_server_is_given_up_and_the_next_stream_has_a_new_connection(tmp_path, busy):
    async def scenario():
        scripted = Scripted()
        server = OverGrpc(scripted, tmp_path, every_s=0.1)
        link = await server.start()
        loop = asyncio.get_running_loop()
        job = None
        async with aio.timeout(60):
            async with stream(link) as (_, task):
                await until(lambda: server.beats >= 3)
                if busy:
                    scripted.stuck = asyncio.Event()
                    job = asyncio.create_task(link.read(scripted.offer(DATA), 0, lambda frame: None))
                    await scripted.stuck.wait()
                assert not task.done()
                server.silent, began = True, loop.time()
                with pytest.raises(Broken, match="stopped answering"):
                    await task
                took = loop.time() - began
            if job is not None:
                with pytest.raises(Broken, match="stopped answering"):
                    await job
            scripted.stuck, server.silent = None, False
            async with stream(link):
                await until(lambda: len(server.peers) == 2)
            assert len(set(server.peers)) == 2
            await link.close()
            await server.stop()
        return took

    took = aio.run(scenario())
    assert (took > 1.0) is busy, "a transfer that is under way gives silence more time"


async def test_a_device_takes_each_new_pace_and_repeats_it(tmp_path):
    server = OverGrpc(Scripted(), tmp_path, every_s=0.2)
    link = await server.start()
    async with aio.timeout(60), stream(link) as (_, task):
        for pace_s in (0.2, 0.7, 0.1):
            before, server.every_s = len(server.paces), pace_s
            await until(lambda pace_s=pace_s, before=before: pace_s in server.paces[before:])
        assert not task.done()
    await link.close()
    await server.stop()


async def test_a_server_that_sets_no_pace_is_not_watched(tmp_path):
    server = OverGrpc(Scripted(), tmp_path)
    link = await server.start()
    async with stream(link) as (_, task):
        await asyncio.sleep(0.5)
        assert not task.done()
        assert server.beats == 0
    await link.close()
    await server.stop()


def test_a_frame_is_at_most_twice_the_one_before_however_fast_the_first_ones_went():
    """Buffers of this machine take the first frames at once, whatever the link behind them."""
    pace = Pace(lambda: 0.0)
    lengths = []
    for _ in range(8):
        lengths.append(pace.frame_bytes())
        pace.sent(lengths[-1])
    assert lengths == [min(FIRST_BYTES << n, FRAME_BYTES) for n in range(8)]
