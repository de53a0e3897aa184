"""A run from the start to the end of its federation: processes that die are started again, while a trial applies its faults."""

import signal
import time
from collections.abc import Callable

from tests.chaos.site import LOOK_S, Child, Outcome, Red, Site

MAX_STARTS = 40  # most starts of all processes of a run
RESTART_S = 0.5  # pause before a process that ended with an error is started again; a killed one is started at once


class Trial:
    """Faults of a federation. Each method may be overridden; this class has no faults."""

    compares = True  # whether the outcome must be that of an undisturbed run
    tolerated: tuple[int, ...] = ()  # exit codes with which a process may end, to be started again

    def faults(self, who: str) -> str:
        """Return the faults of the first process of the server ("server") or of a group of devices."""
        return ""

    def prepare(self, site: Site) -> None:
        """Prepare the trial before any process is started."""

    def listening(self, site: Site) -> None:
        """Act when the server listens for the first time, before a device is started."""

    def tick(self, site: Site, elapsed_s: float) -> None:
        """Act again and again while the federation runs."""

    def died(self, site: Site, child: Child) -> None:
        """Act when a process has ended and was not started again yet."""

    def refused(self, site: Site, child: Child) -> bool:
        """Return whether a process that ended with an error was expected to; then it is started again."""
        return child.exit in self.tolerated

    def rested(self, site: Site) -> bool:
        """Return whether the trial is over. As long as it is not, no process may end."""
        return True

    def ended(self, site: Site) -> None:
        """Check the trial when all processes have ended.

        Raises:
            Red: An expected event did not happen.
        """


def run(site: Site, trial: Trial, groups: list[str] | None = None) -> Outcome:
    """Run the trial, and return its outcome.

    Raises:
        Red: The run has failed.
    """
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
    """Watch until every device has its model."""
    began, starts = time.monotonic(), 0
    due: dict[str, float] = {}  # time at which a process that ended with an error is started again
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
    """Start a server until it listens, again if it was killed or refused for an expected reason."""
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
    """Return the outcome of an undisturbed run."""
    return run(site, trial_of())
