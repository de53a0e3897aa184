"""Rules for every test: one thread for tensors, any time for an example. `--processor-time` prints the time of each test."""

from __future__ import annotations

import os

from hypothesis import settings

# Set before torch and numpy are imported. The tensors here are small: more threads cost processor time and save none.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

settings.register_profile("attune", deadline=None)  # a slow example on a busy machine is not a failure
settings.load_profile("attune")

pytest_plugins = ["tests.processor_time"]
