"""Lines of a device whose output nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attune.fedclient.console import CLOSED

CODE = """
import sys, time
from attune.fedclient.console import console
screen = console()
time.sleep(0.5)
for number in range(5):
    screen.say(f"line {number}")
screen.close()
open(sys.argv[1], "w").write(screen.last_line)
"""


@pytest.mark.parametrize(("tail", "said"), [("| true", CLOSED + "\n"), ("2>&1 | true", ""), (">&-", ""), (">&- 2>&-", "")])
def test_a_closed_output_is_named_once_and_ends_nothing(tmp_path: Path, tail: str, said: str) -> None:
    """Run a device as in `fedclient ... | head -1`, and without any stdout."""
    end = tmp_path / "end"
    command = f"'{sys.executable}' -c \"$CODE\" '{end}' {tail}"
    done = subprocess.run(["sh", "-c", command], env=os.environ | {"CODE": CODE}, capture_output=True, text=True, timeout=60)
    assert done.stderr == said
    assert end.read_text() == "line 4"
