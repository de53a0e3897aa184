"""Length of training: epochs of orders and of finishing, devices' own fine-tuning at the end, and an early end of rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any

import msgspec

from attune.common.config import RoundSettings, TrainSettings, convert
from attune.common.errors import SettingError
from attune.common.metrics import FINISH_STOPS, LIKELIHOODS_AFTER
from attune.fedserver.core.records import Report
from attune.fedserver.core.voices import bounded

FINISH_EPOCHS = FINISH_STOPS[-1]  # before the last evaluation
# Twenty epochs are too few where an epoch has one or two batches: models that a device can hardly use stay far from trained
# (docs/does-it-help.md#finishing). Such devices take up to three times as many.
FINISH_STEPS = 120
MOST_EPOCHS = 3 * FINISH_EPOCHS
FEWEST_STEPS, MOST_USUAL_EPOCHS = 50, 25  # of an order, where no epochs are set
SCORE_EPOCHS = 5  # before an evaluation that scores what the device would keep if training ended there


def trial_round(train: TrainSettings, rounds: int, by_default: bool = False) -> int | None:
    """Return the round after which devices try several numbers of epochs; None if the fleet does not choose.

    Args:
        train: The settings.
        rounds: Number of all rounds.
        by_default: True if the fleet chooses unless `finish_stop` says otherwise.
    """
    chooses = train.finish_stop == "fleet" or (by_default and train.finish_stop is msgspec.UNSET)
    return rounds - 1 if train.finishes and chooses and rounds > 1 else None


def stops_after(train: TrainSettings, rounds: int, trial: int | None, number: int, tried: Sequence[Report]) -> tuple[int, ...]:
    """Return the numbers of epochs at which devices stop in the evaluation after round `number`; empty: they finish nothing.

    Args:
        train: The settings.
        rounds: Number of all rounds.
        trial: The round of `trial_round`.
        number: The round.
        tried: The evaluations after the trial round, of all devices.
    """
    if not train.finishes:
        return ()
    if number == trial:
        return FINISH_STOPS[1:]
    if number < rounds:
        return (SCORE_EPOCHS,) if number in train.scored_rounds else ()
    if trial is None or (best := likeliest(tried)) is None:
        return (FINISH_EPOCHS,)
    return tuple(stop for stop in FINISH_STOPS[1:] if stop <= best)


def lengthened(stops: tuple[int, ...], train: TrainSettings, samples: int) -> tuple[int, ...]:
    """Return the numbers of epochs of one device in the last evaluation: FINISH_EPOCHS last at least FINISH_STEPS steps.

    Args:
        stops: As `stops_after` returns them; fewer epochs than FINISH_EPOCHS, which the fleet has chosen, stay as they are.
        train: The settings.
        samples: The device's training samples, with those that it holds out.
    """
    if not stops or stops[-1] < FINISH_EPOCHS:
        return stops
    return (*stops[:-1], min(max(FINISH_EPOCHS, epochs_for(FINISH_STEPS, train, samples)), MOST_EPOCHS))


def epochs_for(steps: int, train: TrainSettings, samples: int) -> int:
    """Return the fewest epochs in which a device with so many training samples takes so many steps."""
    return math.ceil(steps / max(1, math.ceil(samples * (1 - train.validation) / train.batch_size)))


def usual_epochs(train: TrainSettings, samples: Iterable[int]) -> int:
    """Return the epochs of an order where none are set: a device of the median size takes FEWEST_STEPS steps, within bounds.

    Args:
        train: The settings; `local_epochs` is the fewest epochs.
        samples: Training samples of each device. Their median is no single device's choice.
    """
    return min(max(train.local_epochs, epochs_for(FEWEST_STEPS, train, median_low(samples))), MOST_USUAL_EPOCHS)


def likeliest(tried: Sequence[Report]) -> int | None:
    """Return the number of epochs with the highest sum of likelihoods over devices, of equal ones the smallest.

    Devices that have not reported all numbers do not count; None if none has. No device has more than a bounded vote.
    """
    rows = [row for row in tried if None not in [getattr(row, name) for name in LIKELIHOODS_AFTER.values()]]
    if not rows:
        return None
    votes = bounded({stop: {row.client: getattr(row, name) for row in rows} for stop, name in LIKELIHOODS_AFTER.items()})
    sums = {stop: math.fsum(of.values()) for stop, of in votes.items()}
    return max(sums, key=lambda stop: sums[stop])  # the first of equal ones


# --- an early end: after `round.patience` rounds in which held-out samples have not become likelier

AUTO = "auto"  # as `round.rounds`
AUTO_ROUNDS: Mapping[str, int] = {"rounds": 200, "patience": 10}
EVERY = 5  # rounds from one comparison to the next


def round_settings(given: Mapping[str, Any]) -> RoundSettings:
    """Return the settings of rounds, with those that `auto` stands for.

    Raises:
        SettingError: A setting is unknown or wrong.
    """
    if given.get("rounds") == AUTO:
        given = {**AUTO_ROUNDS, **{key: value for key, value in given.items() if key != "rounds"}}
    return convert(RoundSettings, given, "round.")


def with_scores(train: TrainSettings, rounds: RoundSettings) -> TrainSettings:
    """Return the settings of training, in which devices report likelihoods if these may end the federation.

    Raises:
        SettingError: The settings allow no such end.
    """
    if not rounds.patience:
        return train
    if rounds.mode != "synchronous":
        raise SettingError('round.patience compares states that all devices evaluate: set round.mode = "synchronous"')
    if not train.validation:
        raise SettingError("round.patience needs held-out samples: set train.validation above 0, or set round.rounds")
    scored = sorted({*train.scored_rounds, *range(EVERY, rounds.rounds + 1, EVERY)})
    return msgspec.structs.replace(train, score_after=tuple(scored))


def improves(now: Mapping[str, float], best: Mapping[str, float]) -> bool:
    """Return whether the fleet explains held-out samples better than after the best round so far.

    It counts the devices that have scored both, each with a bounded vote. If these are less than half of the devices of one of
    the two, the fleet is another one: the comparison begins anew with the later round.
    """
    both = now.keys() & best.keys()
    if 2 * len(both) < max(len(now), len(best)):
        return True
    votes = bounded({name: {device: of[device] for device in both} for name, of in (("now", now), ("best", best))})
    return math.fsum(votes["now"].values()) > math.fsum(votes["best"].values())
