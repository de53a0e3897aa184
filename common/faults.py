"""Fault injection for tests: a process dies, hangs or fails at a named step, without patches to the code.

Off unless the environment variable ATTUNE_FAIL_AT is set to one or more of WHO:ROUND:STEP=ACTION, separated by commas:

    ATTUNE_FAIL_AT="server:2:committed=kill,kiel:1:training=hang"

WHO is `server`, a device's name, or `*` for any. With a ROUND (0 before the first) a fault strikes once in a process; with `*`
it strikes every time. The steps are the names that `fail_at` is called with. ACTION is one of

    kill           kill the process, as kill -9 does
    stop           stop the process, as SIGSTOP does, until it gets SIGCONT
    hang           hang the thread for good
    sleep:SECONDS  let the thread sleep
    raise-NAME     raise an OSError with the errno NAME, such as raise-ENOSPC for a full disk

A fault writes one line to stderr before it strikes.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass

from attune.common.errors import SettingError

VARIABLE = "ATTUNE_FAIL_AT"
ANY = "*"
SERVER = "server"
HANG_S = 86400.0
_FORM = "WHO:ROUND:STEP=ACTION, such as server:2:committed=kill"


@dataclass(frozen=True)
class Fault:
    """One fault to inject. `round`: None is every round."""

    who: str
    round: int | None
    step: str
    action: str

    def __str__(self) -> str:
        return f"{self.who}:{ANY if self.round is None else self.round}:{self.step}={self.action}"

    def meets(self, who: str, round_: int, step: str) -> bool:
        """Return whether the fault strikes at this step."""
        return self.step == step and self.who in (ANY, who) and self.round in (None, round_)


_armed: list[Fault] = []


def fail_at(who: str, round_: int, step: str) -> None:
    """Execute the fault that is armed for this step, if any. `who`: `server` or the device's name.

    Raises:
        OSError: That is the fault.
    """
    if _armed:
        _strike(who, round_, step)


def arm(text: str) -> None:
    """Set the faults of this process, in place of those before; none for an empty text.

    Raises:
        SettingError: The text has another form, or names an unknown action.
    """
    _armed[:] = [_parsed(entry.strip()) for entry in text.split(",") if entry.strip()]


def _parsed(entry: str) -> Fault:
    place, equals, action = entry.partition("=")
    who, _, rest = place.partition(":")
    round_, _, step = rest.partition(":")
    if not equals or not who or not (round_ == ANY or round_.isdecimal()):
        raise SettingError(f"{VARIABLE} takes {_FORM}; not {entry!r}")
    _check_action(action)
    return Fault(who, None if round_ == ANY else int(round_), step, action)


def _check_action(action: str) -> None:
    kind, _, detail = action.partition(":")
    known = action in ("kill", "stop", "hang")
    known = known or (kind == "sleep" and detail.replace(".", "", 1).isdecimal())
    if not known and not hasattr(errno, action.removeprefix("raise-")):
        raise SettingError(f"{VARIABLE}: unknown action {action!r} (known: kill, stop, hang, sleep:SECONDS, raise-ENOSPC)")


def _strike(who: str, round_: int, step: str) -> None:
    fault = next((fault for fault in _armed if fault.meets(who, round_, step)), None)
    if fault is None:
        return
    if fault.round is not None:
        _armed.remove(fault)
    # print would buffer, and a process that is killed flushes nothing.
    os.write(2, f"fault: {who}:{round_}:{step}={fault.action}\n".encode())
    _act(fault.action)


def _act(action: str) -> None:
    kind, _, seconds = action.partition(":")
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()  # the signal may take a moment to arrive
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hang":
            time.sleep(HANG_S)
        case "sleep":
            time.sleep(float(seconds))
        case _:
            number = getattr(errno, action.removeprefix("raise-"))
            raise OSError(number, os.strerror(number))


arm(os.environ.get(VARIABLE, ""))
