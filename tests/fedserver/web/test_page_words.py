"""Words of the page, by its own code without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from attune.fedserver import web
from attune.fedserver.core.fleet_verdict import fleet_verdicts

NODE = shutil.which("node")
PAGE = Path(web.__file__).parent / "page" / "summary.js"
# Elements that keep their text, in the place of a browser's.
SCRIPT = """
const made = () => ({ said: [], setAttribute() {}, addEventListener() {}, append(...all) { this.said.push(...all); },
  replaceChildren(...all) { this.said = all; }, set textContent(text) { this.said = [text]; } });
const known = {};
globalThis.document = { getElementById: (id) => (known[id] ??= made()), createElement: made, createElementNS: made };
const { summary } = await import(process.argv[1]);
summary(JSON.parse(process.argv[2]), []);
const told = (one) => (typeof one === "string" ? [one] : one.said.flatMap(told));
console.log(JSON.stringify(told(known.summary)));
"""
RUN = {
    "state": "done", "paused": False, "round": 3, "rounds": 3, "kind": "folder", "method": "fedper", "version": "1",
    "troubles": [], "adapting": [], "left_s": None, "bytes_up": 0, "bytes_down": 0, "seconds": 0, "disk_free_bytes": None,
}  # fmt: skip


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
def test_the_fleets_verdicts_have_the_words_of_the_status() -> None:
    counts = {f"kept_{word}_than_{rival}": n for rival in ("local", "common") for word, n in (("better", 9), ("worse", 1))}
    verdicts = [one.report() for one in fleet_verdicts({name: {**counts, "test_samples": 40} for name in "abc"})]
    assert len(verdicts) == 2
    words = [str(NODE), "--input-type=module", "-e", SCRIPT, str(PAGE), json.dumps({**RUN, "fleet": verdicts})]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    told = " ".join(json.loads(done.stdout))
    for verdict in verdicts:
        assert f"what devices keep {verdict['words']}" in told
