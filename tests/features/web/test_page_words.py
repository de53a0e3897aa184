"""Words of the page, by its own code without a browser."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attune.features import web
from attune.features.web.facts import PageFacts
from attune.features.web.parts import parts
from attune.fedserver.core.fleet_verdict import fleet_verdicts
from attune.fedserver.core.messages import Record
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.status import status

NODE = shutil.which("node")
PAGE = Path(web.__file__).parent / "page"
# Elements that keep their text, in the place of a browser's.
SCRIPT = """
const made = () => ({ said: [], value: "name", setAttribute(name, value) { this[name] = value; }, addEventListener() {},
  append(...all) { this.said.push(...all); }, replaceChildren(...all) { this.said = all; },
  insertBefore(one) { this.said.push(one); }, get children() { return this.said.filter((one) => one.said); },
  get tBodies() { return [this]; }, set textContent(text) { this.said = [text]; } });
const known = {};
globalThis.location = { hash: "" };
globalThis.document = { getElementById: (id) => (known[id] ??= made()), createElement: made, createElementNS: made };
const [, page, run, devices, ...parts] = process.argv;
const told = (one) => (typeof one === "string" ? [one] : [one["aria-label"] ?? "", ...one.said.flatMap(told)]);
(await import(`${page}/summary.js`)).summary(JSON.parse(run), JSON.parse(devices));
(await import(`${page}/devices.js`)).devices(JSON.parse(devices), JSON.parse(run), []);
console.log(JSON.stringify(parts.map((part) => told(known[part]).join(" "))));
"""
RUN = {
    "state": "done", "paused": False, "round": 3, "rounds": 3, "kind": "folder", "method": "fedper", "version": "1",
    "metric": "accuracy", "metric_described": "accuracy",
    "warnings": [], "troubles": [],
    "adapting": [], "left_s": None, "bytes_up": 0, "bytes_down": 0, "seconds": 0, "disk_free_bytes": None,
}  # fmt: skip


DEVICE = {
    "name": "anna", "stage": "finished", "why": "", "note": None, "interval": [0.6, 0.9], "accuracy": 0.75, "verdict": "better",
    "gain": 0.0625, "accuracy_constant": 0.5, "samples": 40, "totals": {}, "expires": None, "revoked": False,
}  # fmt: skip
pytestmark = pytest.mark.skipif(NODE is None, reason="Node.js is not installed")


def shown(fleet: list[dict[str, Any]], devices: list[dict[str, Any]], *parts: str, **more: object) -> list[str]:
    """Return the text of parts of the page, by their ids."""
    facts = (json.dumps({**RUN, "fleet": fleet, **more}), json.dumps(devices))
    words = [str(NODE), "--input-type=module", "-e", SCRIPT, str(PAGE), *facts, *parts]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_the_fleets_verdicts_have_the_words_of_the_status() -> None:
    counts = {f"kept_{word}_than_{rival}": n for rival in ("local", "common") for word, n in (("better", 9), ("worse", 1))}
    verdicts = [one.report() for one in fleet_verdicts({name: {**counts, "test_samples": 40} for name in "abc"})]
    assert len(verdicts) == 2
    [told] = shown(verdicts, [], "summary")
    for verdict in verdicts:
        assert f"what devices keep {verdict['words']}" in told


def test_models_that_a_device_has_are_drawn_and_in_the_key_and_others_are_not() -> None:
    scored = DEVICE | {"accuracy_alone": 0.75, "accuracy_kept": 0.875, "accuracy_common": None, "accuracy_local": None}
    key, table = shown([], [scored], "key", "devices")
    assert "hexagon:   what it keeps;" in key and "the best ordinary model that it fits alone (scikit-learn)" in key
    assert "the common model" not in key and "a network trained on it alone" not in key
    assert "own 0.750, alone 0.750, kept 0.875" in table and "+0.063" in table
    key, table = shown([], [DEVICE | {"accuracy_common": 0.5, "accuracy_local": None}], "key", "devices")
    assert "the common model" in key and "scikit-learn" not in key and "common 0.500, own 0.750" in table


def test_a_devices_variant_of_the_model_is_beside_its_samples() -> None:
    snapshot = Snapshot(None, None, Record(), (DeviceRecord("anna", "key"),), (), (), variants={"anna": "small"})
    [device] = parts(PageFacts("server", status(snapshot, set()), []))["devices"]
    assert device["variant"] == "small"
    assert "40 small" in " ".join(shown([], [DEVICE | {"variant": "small"}], "devices")[0].split())
    assert "small" not in shown([], [DEVICE | {"variant": None}], "devices")[0]


def test_what_is_strange_about_the_devices_data_is_shown() -> None:
    records = [
        DeviceRecord(name, "key", labels=labels)
        for name, labels in (("kiel", "krank, gesund"), ("lund", "ill, well"), ("oslo", "ill, well"))
    ]
    snapshot = Snapshot(None, None, Record(), tuple(records), (), ())
    run = parts(PageFacts("server", status(snapshot, set()), []))["run"]
    assert (
        shown([], [], "warnings", warnings=run["warnings"])[0]
        .strip()
        .startswith("no class of these devices occurs at another one: kiel")
    )
    assert shown([], [], "warnings", "troubles", troubles=["lost"]) == ["", "  lost"]
