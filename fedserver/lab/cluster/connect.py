"""From what `--lab` says to a team of workers that can do the lab's work."""

from __future__ import annotations

from importlib.metadata import version

import torch

from attune.common.errors import SettingError
from attune.fedserver.lab.cluster.crew import Crew, Unavailable
from attune.fedserver.lab.cluster.hand import Facts
from attune.fedserver.lab.cluster.place import Place
from attune.fedserver.lab.cluster.team import Task, Team


def connect(place: Place, threads: int) -> Team:
    """A team over the cluster of `place`, each worker with so many threads.

    Errors: SettingError without a cluster there, or with one whose workers cannot do the work.
    """
    from attune.fedserver.lab.cluster.ray_crew import RayCrew

    return team_of(RayCrew(place.address, threads, place.workers))


def team_of(crew: Crew) -> Team:
    """All workers, each tried. Errors: SettingError."""
    try:
        team = Team(crew)
        asked = [(seat, Task(seat, "facts", lambda _: ())) for seat in team.seats]
        for seat, task in asked:
            facts: Facts = task.answer()
            _check(facts)
            seat.kept_bytes = facts.kept_bytes
    except Unavailable as error:
        crew.close()
        raise SettingError(f"--lab: the cluster's workers cannot begin: {error}") from error
    except SettingError:
        crew.close()
        raise
    return team


def _check(facts: Facts) -> None:
    mine = version("attune-fl"), torch.__version__
    if (facts.attune, facts.torch) != mine:
        raise SettingError(
            f"--lab: the cluster has attune-fl {facts.attune} and torch {facts.torch}, this server {mine[0]} and {mine[1]}: "
            "install the same there, or results would differ"
        )
