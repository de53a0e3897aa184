"""Length of training: epochs of orders, and an early end of rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median_low
from typing import Any

import msgspec

from attune.common.config import RoundSettings, TrainSettings, convert
from attune.common.errors import SettingError
from attune.fedserver.core.voices import bounded

FEWEST_STEPS, MOST_USUAL_EPOCHS = 50, 25  # of an order, where no epochs are set


def usual_epochs(train: TrainSettings, samples: Iterable[int]) -> int:
    """Return the epochs of an order where none are set: a device of the median size takes FEWEST_STEPS steps, within bounds.

    Args:
        train: The settings; `local_epochs` is the fewest epochs.
        samples: Training samples of each device. Their median is no single device's choice.
    """
    per_epoch = max(1, math.ceil(median_low(samples) * (1 - train.validation) / train.batch_size))
    return min(max(train.local_epochs, math.ceil(FEWEST_STEPS / per_epoch)), MOST_USUAL_EPOCHS)


# --- an early end: after `round.patience` rounds in which held-out samples have not become likelier

AUTO = "auto"  # as `round.rounds`
NO_TRAINING: Mapping[str, Any] = {"analytic": "off", "patience": 0, "take_back": 0.0, "adapt_rounds": 0}
AUTO_ROUNDS: Mapping[str, int] = {"rounds": 200, "patience": 10}
EVERY = 5  # rounds from one comparison to the next


def round_settings(given: Mapping[str, Any]) -> RoundSettings:
    """Return the settings of rounds, with those that `auto` stands for.

    Raises:
        SettingError: A setting is unknown or wrong.
    """
    if given.get("rounds") == AUTO:
        given = {**AUTO_ROUNDS, **{key: value for key, value in given.items() if key != "rounds"}}
    rounds = convert(RoundSettings, given, "round.")
    if rounds.matrix and rounds.given is None:
        raise SettingError("round.matrix is set by `fedserver evaluate --matrix`: leave it out")
    return rounds if rounds.given is None else msgspec.structs.replace(rounds, **NO_TRAINING, rounds=int(rounds.matrix))


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
