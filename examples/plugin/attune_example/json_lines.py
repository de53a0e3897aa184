"""Data sets of JSON lines: a file NAME.jsonl, in which each line is a sample such as {"x": [1.5, 2.0], "y": "yes"}."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from attune.plugin import Raw, ReadOptions, ShardError


class JsonLines:
    """Reader of JSON lines. `fedclient partition --dataset NAME.jsonl` cuts what it reads into shards."""

    def recognises(self, path: Path) -> bool:
        """Return whether this reader can read the path, by its name."""
        return path.suffix == ".jsonl" and path.is_file()

    def read(self, path: Path, options: ReadOptions) -> Raw:
        """Return the samples, (N, F) and (N,), for training: each scheme makes a test part. Attune checks and encodes them.

        Raises:
            ShardError: A line is not such an object.
        """
        try:
            samples = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
            x, y = np.array([sample["x"] for sample in samples], np.float32), np.array([sample["y"] for sample in samples])
        except (ValueError, KeyError, TypeError) as error:
            raise ShardError(f'{path} has a line that is not {{"x": [numbers], "y": label}} ({error})') from None
        return Raw(path.stem, (x, y))


READER = JsonLines()
