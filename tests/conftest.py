"""What holds for every test: one thread for tensors, and `--processor-time` says what each test costs."""

from __future__ import annotations

import os

# Before torch and numpy are imported. The tensors here are small: more threads cost more processor time and save none.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

pytest_plugins = ["tests.processor_time"]
