"""First uses of a struct's type by many threads at once, which msgspec alone does not survive."""

import re
import subprocess
import sys
from pathlib import Path

FIRST_USES = """
import sys, threading

sys.setswitchinterval(1e-6)
import msgspec

from attune.common.text import converted, from_json


def fresh(number):
    # Return a type that msgspec has not seen, with another one in it.
    inner = [(f"a{place}", "list[int] | None", None) for place in range(20)]
    globals()[f"Inner{number}"] = msgspec.defstruct(f"Inner{number}", inner, module=__name__)
    outer = [(f"b{place}", f"dict[str, Inner{number}] | None", None) for place in range(20)]
    return msgspec.defstruct(f"Outer{number}", outer, module=__name__)


def used(kind, gate, decodes):
    gate.wait()
    if decodes:
        from_json(b'{"b0": {"x": {"a0": [1]}}}', kind)
    else:
        converted({"b0": {"x": {"a0": [1]}}}, kind)


for number in range(30):
    kind, gate = fresh(number), threading.Barrier(8)
    threads = [threading.Thread(target=used, args=(kind, gate, place % 2)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_use_a_type_first_at_the_same_time_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_no_other_code_has_msgspec_make_typed_structs() -> None:
    """Leave that to common/text.py, in which one thread at a time uses a type first."""
    root = Path(__file__).parents[2]
    typed = re.compile(r"msgspec\.convert\(|\.decode\([^\n]*type=|\.Decoder\(")
    places = [
        path for room in ("common", "fedserver", "fedclient", "simulation", "contrib") for path in (root / room).rglob("*.py")
    ]
    assert len(places) > 400
    found = {str(path.relative_to(root)) for path in places if typed.search(path.read_text(encoding="utf-8"))}
    assert found == {"common/text.py"}
