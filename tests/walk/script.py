"""A page as a script: its blocks in their order, run as a reader of the page would.

A block `sh` runs to its end. A block with the title "in a terminal of its own" runs beside the others; if it is a server, the
next block waits until devices can join. A block `python` with a title is a file of that name; without a title it is run.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = re.compile(r'^```(?P<language>sh|python)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```$', re.MULTILINE | re.DOTALL)
APART = "in a terminal of its own"
# Commands that take minutes, and have the same result with the environment in which the test runs.
INSTALLING = ("make install", ". .venv/bin/activate", "make demo")
NOT_WALKED = ("make test",)  # it takes minutes, and CI runs it beside this walk
HEAD = """set -eo pipefail
said=$(mktemp -d)
pids=()
trap 'for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; cat "$said"/* 2>/dev/null || true' EXIT
"""
JOINABLE = 'until grep -q "fedclient join" "$said/{log}"; do kill -0 $! || exit 90; sleep 0.1; done\n'
TAIL = 'for pid in "${pids[@]}"; do wait "$pid"; done\npids=()\n'


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    code: str


def blocks(page: str) -> list[Block]:
    return [Block(found["language"], found["title"] or "", found["code"]) for found in BLOCK.finditer(page)]


def script(page: str, real: bool) -> str:
    """Return a script for bash. With `real` it has the commands that install."""
    return HEAD + "".join(_lines(blocks(page), real)) + TAIL


def _lines(found: list[Block], real: bool) -> Iterator[str]:
    for number, block in enumerate(found):
        if block.language == "python":
            yield (
                f"cat > {shlex.quote(block.title)} <<'END'\n{block.code}END\n"
                if block.title
                else f"python - <<'END'\n{block.code}END\n"
            )
        elif block.title.startswith(APART):
            log = f"{number:02}"
            yield f'( {block.code.strip()} ) > "$said/{log}" 2>&1 &\npids+=($!)\n'
            yield JOINABLE.format(log=log) if " fedserver " in f" {block.code}" else ""
        else:
            yield "".join(
                f"echo '$' {shlex.quote(line)}\n{line}\n"
                for line in block.code.splitlines()
                if line not in NOT_WALKED and (real or line not in INSTALLING)
            )
