"""`fedserver --method auto`: a race of methods over one fleet. Each candidate is a run, which is put aside while others train.

The ledger keeps the race: what was asked for, and the legs that are over. Everything else follows from that. So a server that
is killed goes on with the same leg, and the same scores make the same choice (fedserver.choosing.racing).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from attune.common.config import AUTO, merge
from attune.common.errors import AttuneError, FederationFailed, HomeMismatch
from attune.common.faults import SERVER, fail_at
from attune.common.protocol import SUMS
from attune.fedserver import runs
from attune.fedserver.choosing.candidates import check_race, common_settings, entrants_of, named_candidates, with_options
from attune.fedserver.choosing.race_course import Race, RunLeg, reached, run_of
from attune.fedserver.choosing.racing import ALONE, reported_scores
from attune.fedserver.core import planning
from attune.fedserver.core.messages import Phase
from attune.fedserver.core.state import Round
from attune.fedserver.federation.coordinator import Coordinator
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.ledger import Ledger
from attune.fedserver.ports.storage import HomeStorage

LOG = logging.getLogger("fedserver")
BY = "server, --method auto"
LOOK_S = 0.1  # between two looks whether a leg is over
ANOTHER = "this home belongs to a federation that was begun {} --method auto: leave the settings out, or use a new --home"


@dataclass(frozen=True)
class Turn:
    """A leg of a race that this process serves.

    Attributes:
        race: The race before it.
        name: The entrant whose run is served.
        until: The round after which the next leg follows; 0: devices only say what data they have; None: the race is over.
        overrides: Settings of this start.
    """

    race: Race
    name: str
    until: int | None
    overrides: dict[str, Any]

    def words(self) -> str:
        """Return what is done, for the operator."""
        if self.until == 0:
            return "auto: waiting for devices, whose data say which methods can take part"
        if self.until is None:
            return f"auto: the run of {self.name} goes on to its end, and devices keep its models"
        return f"auto: {self.name} trains to round {self.until}"


def is_asked_for(given: Mapping[str, Any]) -> bool:
    """Return whether settings have `auto` as the method's name."""
    return bool(given.get("method", {}).get("name") == AUTO)


def first_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which a server waits for the data of a race's devices.

    Raises:
        SettingError: The settings allow no race, or those of a named candidate are wrong.
    """
    common = common_settings(given, check_race(given))
    for name, options in named_candidates(given).items():
        planning.resolve(with_options(common, name, options))
    return with_options(common, ALONE, {})


async def turn_of(home: ServerHome, storage: HomeStorage, given: Mapping[str, Any]) -> Turn | None:
    """Return the leg of a race that a start serves, and make its run the present one; None without a race.

    The home is locked.

    Args:
        home: The home.
        storage: Its storage.
        given: Settings of this start.

    Raises:
        HomeMismatch: The home is of a federation without a race, or the settings contradict those of its race.
        DiskFull: There is no space for another run.
    """
    snapshot = await storage.ledger.snapshot()
    race = snapshot.race
    if race is None:
        if not is_asked_for(given):
            return None
        if snapshot.overrides is not None:
            raise HomeMismatch(ANOTHER.format("without"))
        race = Race(dict(given), check_race(given))  # kept once the server has its port
    together = merge(race.overrides, given)
    if {**together, "server": {}} != {**race.overrides, "server": {}}:
        raise HomeMismatch(ANOTHER.format("with other settings of"))
    server = {"server": together["server"]} if "server" in together else {}
    if not race.entrants:
        settings = first_settings(race.overrides)
        if snapshot.plan is not None:  # what the devices said then is lost
            await storage.ledger.begin_run("", settings)
            await runs.tidy(storage, await storage.ledger.snapshot())
        return Turn(race, ALONE, 0, merge(settings, server))
    course = race.course()
    name, until = (course.leg.name, course.leg.until) if course.leg else (course.result.chosen, None)
    await runs.switch(home, storage, run_of(name), race.entrants[name], BY)
    return Turn(race, name, until, server)


async def over(turn: Turn, coordinator: Coordinator) -> AttuneError | None:
    """Wait for the end of a leg, and return why its candidate cannot go on; None if it has come to the end.

    The end is that its round is closed and evaluated; of the first leg, that the devices' data are known.

    Raises:
        AttuneError: The server cannot go on: the error is not the candidate's.
    """
    while not (reached(coordinator.state.round.record, turn.until) if turn.until else coordinator.state.plan is not None):
        if coordinator.finished.is_set() and (error := coordinator.error) is not None:
            if turn.name == ALONE or coordinator.unusable.is_set() or not isinstance(error, FederationFailed):
                raise error
            return error
        if turn.name != ALONE and (why := _cannot_train(coordinator.state.round)):
            return FederationFailed(why)
        await asyncio.sleep(LOOK_S)
    return None


def _cannot_train(now: Round) -> str:
    """Explain that most devices fail at the open round, of which no earlier state can be taken back; empty if they do not."""
    failed, devices = len(now.troubled), len(now.record.devices)
    is_stuck = now.record.phase is Phase.TRAINING and 2 * failed > devices
    return f"{failed} of {devices} devices could not train with it" if is_stuck else ""


async def end_leg(ledger: Ledger, turn: Turn, coordinator: Coordinator, error: AttuneError | None) -> Race:
    """Keep what a leg has brought, durably, and return the race after it.

    Args:
        ledger: Where to.
        turn: The leg.
        coordinator: Its federation.
        error: Why the candidate cannot go on; None: it has come to the end of the leg.

    Raises:
        SettingError: No candidate fits the data, or no device has scored training alone.
    """
    race, until = turn.race, turn.until or 0
    if error is not None:
        race = race.after(RunLeg(turn.name, until, failed=str(error)))
    elif not until:
        able = [name for name in coordinator.planner.profiles if coordinator.state.streams.can(name, SUMS)]
        given, profiles = race.overrides, coordinator.planner.profiles
        entrants = await asyncio.to_thread(entrants_of, given, profiles, lambda _, settings: settings, able)
        settings = {name: dict(of) for name, of in entrants.settings.items()}
        race = msgspec.structs.replace(race, entrants=settings, left_out=dict(entrants.left_out))
    else:
        snapshot = await ledger.snapshot()
        rows = [row for row in snapshot.rows if (row.work, row.round) == ("evaluate", until)]
        record = snapshot.record
        if not rows and record.devices and not record.excused and record.round == until:
            LOG.warning("no device was there to evaluate %s after round %d: they are asked again", turn.name, until)
            await ledger.put_record(msgspec.structs.replace(record.revive(), phase=Phase.EVALUATING))
            return race
        out = {device.name for device in snapshot.devices if device.revoked}
        race = race.after(RunLeg(turn.name, until, *reported_scores([row for row in rows if row.client not in out])))
    race.course()
    fail_at(SERVER, until, "leg-over")
    await ledger.set_race(race)
    fail_at(SERVER, until, "race-written")
    return race


def new_words(before: Race, after: Race) -> list[str]:
    """Return the lines of a race that a leg has added."""
    known = before.words()
    return [line for line in after.words() if line not in known]
