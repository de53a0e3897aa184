"""A process that holds learners: it answers one request after the other until its parent is gone."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import cast

from attune.common.errors import AttuneError
from attune.common.torch_state import plain_torch
from attune.fedclient.work.executor import Work
from attune.fedclient.work.learner import Learner
from attune.fedclient.work.objectives.base import OnProgress
from attune.fedclient.work.processes import requests
from attune.fedclient.work.processes.pipe import packed, receive, send, unpacked
from attune.fedclient.work.worker import local_learner

CHECK_S = 0.05  # seconds between two checks whether the order at hand is to be given up
PROGRESS_S = 1.0  # seconds between two reports of progress


def main(descriptor: int) -> None:
    """Answer requests over this open socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    end, learners = Connection(descriptor), HostedLearners()
    try:
        while True:
            message = receive(end)
            if isinstance(message, requests.GiveUpWork):
                continue  # the order is done already
            dropped, request = message
            learners.drop(dropped)
            parent = _Parent(end)
            with plain_torch():
                answer = learners.answer(request, parent.progress, parent.cancelled)
            send(end, answer)
    except (EOFError, OSError):
        return  # the parent is gone


class _Parent:
    """The parent, while an order is carried out."""

    def __init__(self, end: Connection) -> None:
        self._end, self._cancelled = end, False
        self._checked = self._reported = time.monotonic()

    def cancelled(self) -> bool:
        """Return whether the parent has cancelled, or is gone."""
        now = time.monotonic()
        if not self._cancelled and now - self._checked >= CHECK_S:
            self._checked = now
            self._cancelled = self._end.poll()
        return self._cancelled

    def progress(self, share: float) -> None:
        now = time.monotonic()
        if now - self._reported >= PROGRESS_S:
            self._reported = now
            send(self._end, requests.WorkProgress(share))


class HostedLearners:
    """The devices that were placed here, each with its data, plan and orders. Their learners may come and go."""

    def __init__(self) -> None:
        self._placed: dict[str, requests.PlaceDevice] = {}
        self._learners: dict[str, Learner] = {}

    def drop(self, names: Iterable[str]) -> None:
        """Drop the learners of these devices. Their orders have everything that was learnt."""
        for name in names:
            self._learners.pop(name, None)

    def answer(self, request: requests.HostRequest, progress: OnProgress, cancelled: Callable[[], bool]) -> requests.HostAnswer:
        """Answer a request; an error is an answer too."""
        try:
            return self._answer(request, progress, cancelled)
        except Exception as error:
            return requests.RequestFailed(portable(error))

    def _answer(
        self, request: requests.HostRequest, progress: OnProgress, cancelled: Callable[[], bool]
    ) -> requests.HostAnswer:
        match request:
            case requests.PlaceDevice(name):
                self._learners.pop(name, None)
                self._placed[name] = request
                return self._state(name)
            case requests.MakeReady(name):
                return self._state(name)
            case requests.CarryOut(name, order, fetched, bytes_down):
                Work(self._learner(name), order, fetched, bytes_down, progress, cancelled).run()
                return self._state(name)
            case requests.GetFinished(name):
                return requests.FinishedModels(self._learner(name).finished())
            case requests.ForgetAll(path):
                sys.path[:] = path
                self._placed.clear()
                self._learners.clear()
                return requests.Forgotten()

    def _learner(self, name: str) -> Learner:
        if name not in self._learners:
            placed = self._placed[name]
            learner = local_learner(placed.plan, placed.shard, name, lambda _: placed.orders, placed.options)
            self._learners[name] = cast(Learner, learner)
        return self._learners[name]

    def _state(self, name: str) -> requests.LearnerState:
        learner = self._learner(name)
        return requests.LearnerState(
            learner.holdings, learner.standardiser, learner.targets, learner.size_bytes, learner.newest, learner.orders
        )


def portable(error: Exception) -> Exception:
    """Return the error, or one with its text if it cannot be sent."""
    try:
        unpacked(*packed(error))
        return error
    except Exception:
        return AttuneError(f"{type(error).__name__}: {error}")
