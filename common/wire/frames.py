"""The size of a frame, the unit in which blobs travel and files are read."""

from __future__ import annotations

FRAME_BYTES = 1 << 20  # between two asyncio ends 1 MiB is the sweet spot: smaller and larger frames are both slower
