"""Helper processes, and Python objects to and from them: pickled, with the bytes of tensors and arrays beside the pickle.

Never between federation peers, never on disk: both ends are one program on one machine. torch is imported for tensors alone.
"""

from __future__ import annotations

import io
import os
import pickle  # noqa: TID251 (never between peers, never on disk)
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

ALIGNED = 64  # bytes at which tensors begin, as torch itself would place them
JOINED = 1 << 20  # bytes up to which buffers are copied together, so that a message is one write


def start_helper(program: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a Python process that finds the same code, and return it and our end of a pipe.

    It is not a process of multiprocessing: those import the parent's script again, so a script without a guard would run twice.

    Args:
        program: Its code; `sys.argv[1]` is the descriptor of its end.
    """
    mine, its = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(its.fileno())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, pass_fds=(its.fileno(),), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    its.close()
    return process, mine


class Ends(Protocol):
    """One end of a multiprocessing pipe."""

    def send_bytes(self, buf: Any) -> None: ...

    def recv_bytes(self) -> bytes: ...


class _Pickler(pickle.Pickler):
    def reducer_override(self, given: Any) -> Any:
        """Reduce a plain tensor to its bytes, dtype and shape. Its own pickling copies it and takes ten times as long."""
        torch = sys.modules.get("torch")
        if torch is None or type(given) is not torch.Tensor or given.layout is not torch.strided:
            return NotImplemented
        from attune.common.wire.tensors import bytes_of

        return _tensor, (pickle.PickleBuffer(bytes_of(given)), given.dtype, tuple(given.shape))


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(shape)


def packed(message: object) -> tuple[bytes, list[memoryview]]:
    """Return the message as a pickle, and the buffers that it refers to."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(message)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def unpacked(pickled: bytes, buffers: Sequence[memoryview]) -> Any:
    """Return what `packed` was given. Tensors are views into the buffers, which must be writable."""
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 (of this process's own helper)


def send(end: Ends, message: object) -> None:
    """Send a message.

    Raises:
        OSError: The other process is gone.
    """
    pickled, buffers = packed(message)
    sizes = [buffer.nbytes for buffer in buffers]
    end.send_bytes(pickle.dumps(sizes))
    end.send_bytes(pickled)
    if sum(sizes) <= JOINED:
        if buffers:
            end.send_bytes(b"".join(buffers))
        return
    for buffer in buffers:
        end.send_bytes(buffer)


def receive(end: Ends) -> Any:
    """Return the next message.

    Raises:
        EOFError, OSError: The other process is gone.
    """
    sizes = pickle.loads(end.recv_bytes())  # noqa: S301 (of this process's own helper)
    pickled = end.recv_bytes()
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += -(-size // ALIGNED) * ALIGNED
    if not sizes:
        return unpacked(pickled, [])
    import torch

    room = torch.empty(total, dtype=torch.uint8).numpy().data
    places = [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    if sum(sizes) <= JOINED:
        _fill(places, end.recv_bytes())
    else:
        for place in places:
            place[:] = end.recv_bytes()
    return unpacked(pickled, places)


def _fill(places: Sequence[memoryview], data: bytes) -> None:
    at = 0
    for place in places:
        place[:] = data[at : at + len(place)]
        at += len(place)
