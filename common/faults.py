"""Fault injection for tests: a process dies, hangs or fails at a named step, without patches to the code.

Off unless the environment variable ATTUNE_FAIL_AT is set to one or more of WHO:ROUND:STEP=ACTION, separated by commas:

    ATTUNE_FAIL_AT="server:2:committed=kill,kiel:1:training=hang"

WHO is `server`, a device's name, or `*` for any. With a ROUND (0 before the first) a fault strikes once in a process; with `*`
it strikes every time. STEPS lists the steps. ACTION is one of

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

from attune.common.errors import SettingError, nearest

VARIABLE = "ATTUNE_FAIL_AT"
ANY = "*"
SERVER = "server"
SERVER_STEPS = {
    "settings-written": "the settings bind the home (round 0)",
    "audit-half": "half of a line of the audit log is written (round 0)",
    "plan-committed": "the plan and the first state are in the database (round 0)",
    "certificate-issued": "a certificate is in the database, and not yet sent (round 0)",
    "record-written": "the record of a step is in the database, and its effects are not carried out",
    "upload-whole": "a blob of an update has arrived, and is not durable yet",
    "inbox-renamed": "the blobs of an update are in the inbox, and the entry that makes them count is not",
    "update-accepted": "the entry is durable, and the receipt not sent",
    "masked-accepted": "the masked parts of an update are durable, and the receipt not sent",
    "secure-keys": "secure aggregation: devices have sent their keys",
    "secure-shares": "secure aggregation: devices have sent their shares",
    "secure-masked": "secure aggregation: devices have handed in masked updates, and the survivors are durable",
    "secure-survivors": "secure aggregation: devices have signed the survivors",
    "secure-unmasking": "secure aggregation: devices have sent what unmasks the sum",
    "aggregated": "the files of the next state are written, and nothing is committed",
    "committed": "the round is in the database, and the old files are still there",
    "settled": "the files of the old state are gone, and the round is not yet reported as closed",
    "inbox-cleared": "updates that are no longer needed are gone from the inbox",
    "evaluation-committed": "an evaluation is in the database",
    "leg-over": "a candidate of a race was scored, and the race does not know it (--method auto)",
    "race-written": "the race knows the scores of a candidate, and its run is the present one",
    "run-put-aside": "a run is copied aside, and is still the present one",
    "run-switched": "another run is the present one, and the blobs of the run before are still there",
    "blobs-taken-back": "the blobs of a run that was put aside are back, and its rows are not",
    "run-taken-back": "a run that was put aside is whole, and its copy is still there",
}
DEVICE_STEPS = {
    "key-written": "the key is durable, and no certificate asked for (round 0)",
    "certificate-kept": "the certificate is durable (round 0)",
    "plan-kept": "the plan is durable (round 0)",
    "order-fetched": "all that the order needs is there",
    "training": "after each batch of local training",
    "compared": "models are compared, ordinary ones are fitted and durable, and nothing of the order is written",
    "trained": "an order is carried out, and nothing of it written",
    "state-written": "state and update are written, and not yet in place",
    "order-committed": "state and update are in place",
    "uploaded": "the blobs of an update are sent, and the update is not",
    "submitted": "the receipt is here",
    "secure-keys": "the keys for secure aggregation are durable, and not sent",
    "secure-shares": "its cohort is durable, and its shares are not sent",
    "secure-masked": "the set of its masks is durable, and its masked update is not sent",
    "secure-survivors": "the survivors that it answers are durable, and not signed",
    "secure-unmasking": "what unmasks the sum is not sent",
    "model-saved": "the finished model is durable",
}
STEPS = SERVER_STEPS | DEVICE_STEPS
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
        SettingError: The text has another form, or names an unknown step or action.
    """
    _armed[:] = [_parsed(entry.strip()) for entry in text.split(",") if entry.strip()]


def _parsed(entry: str) -> Fault:
    place, equals, action = entry.partition("=")
    who, _, rest = place.partition(":")
    round_, _, step = rest.partition(":")
    if not equals or not who or not (round_ == ANY or round_.isdecimal()):
        raise SettingError(f"{VARIABLE} takes {_FORM}; not {entry!r}")
    if step not in STEPS:
        raise SettingError(f"{VARIABLE}: unknown step {step!r}{nearest(step, STEPS)}")
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
