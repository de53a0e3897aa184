"""A run from the start to the end of its federation: whoever dies is started again, and a trial strikes meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from tests.chaos.site import LOOK_S, Child, Outcome, Red, Site

MAX_STARTS = 40  # of all processes of a run
RESTART_S = 0.5  # until who ended with an error is started again, as a service unit does; who was killed comes back at once


class Trial:
    """What is done to a federation. Each method may be overridden; this one does nothing."""

    compares = True  # the outcome is that of an undisturbed run
    tolerated: tuple[int, ...] = ()  # exit codes with which a process may end, to be started again

    def faults(self, who: str) -> str:
        """Of the first process of the server ("server") or of a group of devices."""
        return ""

    def prepare(self, site: Site) -> None:
        """Before anything is started."""

    def listening(self, site: Site) -> None:
        """The server listens for the first time; no device was started."""

    def tick(self, site: Site, elapsed_s: float) -> None:
        """Again and again, while the federation runs."""

    def died(self, site: Site, child: Child) -> None:
        """A process has ended and was not started again yet."""

    def refused(self, site: Site, child: Child) -> bool:
        """A process ended with an error. True: this was to be, and it is started again."""
        return child.exit in self.tolerated

    def rested(self, site: Site) -> bool:
        """False: there is more to come, and nobody is to end yet."""
        return True

    def ended(self, site: Site) -> None:
        """Everything has ended. Errors: Red if what should have happened did not."""


def run(site: Site, trial: Trial, groups: list[str] | None = None) -> Outcome:
    """What is left. Errors: Red."""
    groups = groups or site.groups
    trial.prepare(site)
    _start_server(site, trial, trial.faults("server"))
    trial.listening(site)
    for group in groups:
        site.start_device(group, trial.faults(group))
    _watch(site, trial, groups)
    site.stop_server()
    trial.ended(site)
    if found := site.tracebacks():
        raise Red(f"noise in {', '.join(found)}")
    return site.outcome()


def _watch(site: Site, trial: Trial, groups: list[str]) -> None:
    """Until every device has its model."""
    began, starts = time.monotonic(), 0
    due: dict[str, float] = {}  # when who ended with an error is started again
    while any(site.children[group].exit != 0 for group in groups) or not trial.rested(site):
        site.check_time("every device to have its model")
        trial.tick(site, time.monotonic() - began)
        for what in ("server", *groups):
            child = site.children[what]
            if child.exit is None or (what != "server" and child.exit == 0):
                continue
            if child.exit > 0 and time.monotonic() < due.setdefault(what, time.monotonic() + RESTART_S):
                continue
            due.pop(what, None)
            starts += 1
            if starts > MAX_STARTS:
                raise Red(f"{what} ends again and again")
            if what == "server":
                site.note_inbox()
            if child.exit != -signal.SIGKILL and not trial.refused(site, child):
                raise Red(f"{what} ended with {child.exit}")
            trial.died(site, child)
            if what == "server":
                _start_server(site, trial, "")
            else:
                site.start_device(what)
        time.sleep(LOOK_S)


def _start_server(site: Site, trial: Trial, fault: str) -> None:
    """A server that listens; one that was killed before is started again, and so is one that refused with reason."""
    for _ in range(4):
        child = site.start_server(fault)
        fault = ""
        if child.exit is None or "listens on" in child.text:
            return
        if child.exit != -signal.SIGKILL and not trial.refused(site, child):
            raise Red(f"the server ended with {child.exit} instead of listening")
    raise Red("the server does not come up")


def kill(child: Child) -> None:
    child.signal(signal.SIGKILL)


def reference(site: Site, trial_of: Callable[[], Trial] = Trial) -> Outcome:
    """The outcome of a run that nothing disturbs."""
    return run(site, trial_of())
