"""Faults on demand: where they strike, and that the documented names are those in the code."""

import ast
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attune.common import faults
from attune.common.errors import SettingError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults.arm("")


def calls(side):
    """Return the step of every call of fail_at below a folder; of a step that begins with a literal, that prefix and a star.

    The learner of a light device takes the steps of the other one, in whose place it is.
    """
    for path in sorted({*(ROOT / side).rglob("*.py")} - {ROOT / "fedclient/work/light.py"}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fail_at":
                step = node.args[2].values[0] if isinstance(node.args[2], ast.JoinedStr) else node.args[2]
                assert isinstance(step, ast.Constant), f"{path}:{node.lineno}: a step begins with a literal"
                yield step.value if step is node.args[2] else f"{step.value}*"


@pytest.mark.parametrize(("side", "steps"), [("fedserver", faults.SERVER_STEPS), ("fedclient", faults.DEVICE_STEPS)])
def test_every_name_is_called_and_every_call_has_a_name(side, steps):
    called = list(calls(side))
    literal = [step for step in called if not step.endswith("*")]
    begun = [
        step for step in steps if step not in literal and any(step.startswith(one[:-1]) for one in called if one[-1] == "*")
    ]
    assert {*literal, *begun} == {*steps}
    once = [step for step in literal if not step.startswith("secure-")]  # those exchanges are made in rounds and for statistics
    assert len({*once}) == len(once), "each step stands in the code once"


def test_a_fault_strikes_once_in_its_round_alone(capfd):
    faults.arm("kiel:2:trained=raise-ENOSPC, *:*:committed=raise-EIO")
    faults.fail_at("kiel", 1, "trained")
    faults.fail_at("bonn", 2, "trained")
    with pytest.raises(OSError) as caught:
        faults.fail_at("kiel", 2, "trained")
    assert caught.value.errno == errno.ENOSPC
    assert capfd.readouterr().err == "fault: kiel:2:trained=raise-ENOSPC\n"
    faults.fail_at("kiel", 2, "trained")
    for number in (1, 2):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            faults.fail_at("server", number, "committed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kiel:trained=kill", "WHO:ROUND:STEP=ACTION"),
        ("kiel:x:trained=kill", "WHO:ROUND:STEP=ACTION"),
        ("kiel:1:trained", "WHO:ROUND:STEP=ACTION"),
        ("kiel:1:trainde=kill", "did you mean 'trained'"),
        ("kiel:1:trained=explode", "unknown action 'explode'"),
        ("kiel:1:trained=raise-ENOSUCH", "unknown action"),
        ("kiel:1:trained=sleep:x", "unknown action"),
    ],
)
def test_a_misspelt_fault_is_an_error(text, said):
    with pytest.raises(SettingError, match=re.escape(said)):
        faults.arm(text)


def test_kill_and_stop_are_signals_that_the_variable_asks_for():
    code = "from attune.common.faults import fail_at as f; f('a', 1, 'trained'); print('on', flush=True); f('a', 2, 'trained')"
    environment = os.environ | {faults.VARIABLE: "a:1:trained=stop,a:2:trained=kill"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (-signal.SIGKILL, b"on\n")
