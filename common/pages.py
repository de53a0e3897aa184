"""Large pages for tensors: a fresh tensor of 100 MB costs 16 ms of processor time instead of 58, most of it clearing pages."""

from __future__ import annotations

# torch asks Linux for pages of 2 MiB if it finds this in the environment when it makes its first tensor.
LARGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")
