"""Workers of a Ray cluster: each is an actor with a Hand. The one file of the server that imports Ray."""

from __future__ import annotations

import os
import warnings
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from attune.common.errors import SettingError
from attune.fedserver.lab.cluster.crew import Gone, Unavailable
from attune.fedserver.lab.cluster.hand import Hand

LOOKED_S = 1.0  # seconds between two looks whether the worker that is waited for gives signs of life
BEGIN_S = 60.0  # seconds for a worker's first sign of life
SILENT_S = 60.0  # without another one for so long, it counts as dead
REASON = 300  # characters of an error's text
OWN = "local"  # Ray's name for a cluster that it starts
WORK, LIFE = "work", "life"  # each has a thread of its own in a worker


class Member(Hand):
    """A Hand that can be asked whether it lives while it works."""

    def beat(self) -> None:
        """The answer is the sign of life."""


class RayTicket:
    """Implements crew.Ticket."""

    def __init__(self, worker: RayWorker, asked: Any) -> None:
        self._worker, self._asked = worker, asked

    def answer(self) -> Any:
        try:
            while not ray.wait([self._asked], timeout=LOOKED_S)[0]:
                self._worker.look()
            return ray.get(self._asked)
        except RayTaskError as error:
            raise Unavailable(f"a worker failed: {error.cause!r}") from error
        except RayError as error:
            raise Gone(_reason(error)) from error
        except Exception as error:
            raise _lost(error) from error


class RayWorker:
    """Implements crew.Worker."""

    def __init__(self, threads: int) -> None:
        try:
            self._actor = _remote(threads).remote(threads)
        except Exception as error:
            raise _lost(error) from error
        self._beat: Any = None
        self._asked_at, self._patience_s = 0.0, BEGIN_S

    def ask(self, method: str, *arguments: Any) -> RayTicket:
        try:
            return RayTicket(self, getattr(self._actor, method).remote(*arguments))
        except Exception as error:
            raise _lost(error) from error

    def look(self) -> None:
        """Errors: Gone if it has given no sign of life for SILENT_S."""
        if self._beat is not None and ray.wait([self._beat], timeout=0)[0]:
            self._beat, self._patience_s = None, SILENT_S
        if self._beat is None:
            self._beat, self._asked_at = self._actor.beat.remote(), monotonic()
        elif monotonic() - self._asked_at > self._patience_s:
            raise Gone(f"no sign of life for {self._patience_s:.0f} s")

    def end(self) -> None:
        try:
            ray.kill(self._actor)
        except Exception as error:
            raise _lost(error) from error


class RayCrew:
    """Implements crew.Crew. address: ray://HOST:PORT; or "": what RAY_ADDRESS names, else a new cluster of this machine.

    workers: how many; 0: as many as the cluster has processors for, `threads` for each. Errors: SettingError.
    """

    def __init__(self, address: str, threads: int, workers: int) -> None:
        self._threads = threads
        warnings.filterwarnings("ignore", message="More than .* of messages have been created", module="ray")
        if ray.is_initialized():
            raise SettingError("--lab: this program uses a Ray cluster already; start the server by itself")
        try:
            found = address or os.environ.get("RAY_ADDRESS", OWN)
            own = {"num_cpus": workers * threads or None, "include_dashboard": False} if found == OWN else {}
            ray.init(found, log_to_driver=False, logging_level="ERROR", **own)
        except Exception as error:
            ray.shutdown()
            raise SettingError(
                f"--lab: no Ray cluster could be used at {address or 'this machine'} ({_reason(error)}). Look at it with "
                "`ray status` there; it needs the same versions of Python and Ray, and its port for clients (10001)"
            ) from error
        self.size = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)

    def __repr__(self) -> str:
        return f"<RayCrew of {self.size}>"

    def hire(self) -> RayWorker:
        return RayWorker(self._threads)

    def close(self) -> None:
        ray.shutdown()


def _remote(threads: int) -> Any:
    groups = {name: LIFE if name == "beat" else WORK for name in dir(Member) if not name.startswith("_")}
    methods = {name: ray.method(concurrency_group=group)(getattr(Member, name)) for name, group in groups.items()}
    member = type("Member", (Member,), methods)
    return ray.remote(num_cpus=threads, max_restarts=0, concurrency_groups={WORK: 1, LIFE: 1})(member)


def _lost(error: Exception) -> Exception:
    """What an error that Ray raises beside an answer means: it is not there any more."""
    return error if isinstance(error, (Gone, Unavailable)) else Unavailable(_reason(error))


def _reason(error: Exception) -> str:
    """Its text in one line; some of Ray's are pages."""
    return " ".join(str(error).split())[:REASON] or type(error).__name__
