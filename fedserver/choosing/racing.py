"""Race of candidate methods by held-out scores: who goes on at a rung, and who wins in the end (`--method auto`).

Successive halving (Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016)
with two rungs. Early scores say little, because models have learned little: at the first rung a candidate is given up only if
it is behind the second best by more than two standard errors. At the second one the rule of one standard error (Breiman et al.:
Classification and Regression Trees, 1984) keeps a candidate that is not clearly worse. At the end the candidates within one
standard error of the best are told apart by all comparisons together. The best one then wins only if a paired t test over
devices shows that it is ahead of training alone (Bonferroni's level for all candidates). Few held-out samples show little. So
the closed form takes part to the end, and is tested by all training samples, each predicted out of fold. This test asks for the
gain at these devices, not at others like them: its error is from the spread over the samples of each device. Each test has half
of the level. If neither shows a gain, nothing shows that federating pays. Scores are log-likelihoods in nats.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, stdev
from typing import Any

from attune.common.statistics import student_p
from attune.fedserver.core.records import Report
from attune.fedserver.core.voices import bounded

CLOSED_FORM = "closed-form"  # the entrant that trains each device alone beside the closed form; it takes part to the end, too
ALONE = "local"  # the method that trains each device alone; it takes part to the end, whatever its score
PERCENT = (15, 30)  # shares of the rounds at which the rungs are
KEPT = 2  # candidates that go on at the second rung, at most; at the first one at least
FIRST_ERRORS = 2.0  # standard errors by which a candidate must be behind to be given up at the first rung
FALSE_CHOICES = 0.05  # level of all tests against ALONE together
FEWEST_ROUNDS = 3  # with fewer there is no room for two rungs and an end

NOTHING_HELD_OUT = (
    "no device holds samples out by which a method could be chosen; devices need 20 training samples, train.validation above "
    "0, and owners that let scores be reported. Name a method instead of auto"
)
DeviceScores = Mapping[str, float]  # by device


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two candidates' summed scores over the devices that both have scored.

    Attributes:
        first: The candidate with the higher sum; of equal ones the one that was named first.
        second: The other one.
        nats: Sum of the first minus sum of the second.
        error: Standard error of the difference, from its spread over devices; None with one device.
        devices: Number of devices.
        out_of_fold: It is by all training samples, each predicted out of fold, and its error from the spread over these.
    """

    first: str
    second: str
    nats: float
    error: float | None
    devices: int
    out_of_fold: bool = False

    def exceeds(self, errors: float) -> bool:
        """Return whether the difference exceeds so many standard errors. One device alone shows no error, so it does not."""
        return self.error is not None and self.nats > errors * self.error

    @property
    def p(self) -> float:
        """The one-sided p-value that the first is no better: by Student's t over devices; by samples, of the normal one."""
        if self.error is None or self.nats <= 0:
            return 1.0
        t = self.nats / self.error if self.error else math.inf
        return NormalDist().cdf(-t) if self.out_of_fold else student_p(t, self.devices - 1) / 2


@dataclass(frozen=True)
class Decision:
    """Decision at a rung or at the end.

    Attributes:
        totals: Summed score of each candidate, from the best to the worst.
        kept: The candidates that go on; at the end the winner alone.
        difference: The best candidate against the next one, if there are two; at the end against ALONE.
        evidence: At the end, the sums over all comparisons of the candidates that are not clearly behind the best.
        level: At the end, the level of the test against ALONE.
    """

    totals: Mapping[str, float]
    kept: tuple[str, ...]
    difference: PairedDifference | None
    evidence: Mapping[str, float] = field(default_factory=dict)
    level: float = 0.0


def rungs_of(rounds: int) -> tuple[int, int]:
    """Return the rounds after which candidates are compared for the first and the second time.

    Args:
        rounds: Number of all rounds, FEWEST_ROUNDS at least.
    """
    first, second = (-(-percent * rounds // 100) for percent in PERCENT)  # rounded up, without floats
    return first, max(second, first + 1)


def paired(first: str, second: str, scores: Mapping[str, DeviceScores]) -> PairedDifference:
    """Return the difference of two candidates on the devices that both have scored; there is at least one."""
    devices = sorted(scores[first].keys() & scores[second].keys())
    gains = [scores[first][device] - scores[second][device] for device in devices]
    error = math.sqrt(len(gains)) * stdev(gains) if len(gains) > 1 else None
    return PairedDifference(first, second, math.fsum(gains), error, len(gains))


def gained_by_samples(gains: DeviceScores, errors: DeviceScores) -> PairedDifference | None:
    """Return how far CLOSED_FORM is ahead of ALONE by all training samples; None if no device reported it.

    No device counts for more than a few usual ones (voices.bounded): with its gain its error is reduced.

    Args:
        gains: The gain at each device.
        errors: Standard errors of the gains, from the spread over the samples of each device.
    """
    devices = sorted(gains.keys() & errors.keys())
    if not devices:
        return None

    def counted(values: DeviceScores) -> list[float]:
        scores = bounded({CLOSED_FORM: {who: values[who] for who in devices}, ALONE: dict.fromkeys(devices, 0.0)})
        return [scores[CLOSED_FORM][who] - scores[ALONE][who] for who in devices]

    gain_D, error_D = counted(gains), counted(errors)
    reduced = (
        error * (gain / gains[who] if gains[who] else 1.0) for error, gain, who in zip(error_D, gain_D, devices, strict=True)
    )
    return PairedDifference(CLOSED_FORM, ALONE, math.fsum(gain_D), math.hypot(*reduced), len(devices), out_of_fold=True)


def at_rung(rung: int, scores: Mapping[str, DeviceScores]) -> Decision:
    """Decide which candidates go on.

    At the first rung all that are not behind the second one by FIRST_ERRORS. At the second rung the best two, unless their
    paired difference exceeds one standard error.

    Args:
        rung: 0 or 1.
        scores: Of each candidate that is in the race, in the order in which the user named them. Not of ALONE.
    """
    totals = _totals(scores)
    best, others = list(totals)[:KEPT], list(totals)[KEPT:]
    difference = paired(best[0], best[1], scores) if len(best) > 1 else None
    if rung == 0:
        close = [name for name in others if not paired(best[1], name, scores).exceeds(FIRST_ERRORS)]
        return Decision(totals, (*best, *close), difference)
    return Decision(totals, tuple(best[:1] if difference and difference.exceeds(1.0) else best), difference)


def at_end(
    scores: Mapping[str, DeviceScores],
    earlier: Sequence[Mapping[str, DeviceScores]] = (),
    entered: int = 1,
    gained: PairedDifference | None = None,
) -> Decision:
    """Decide who wins: the best candidate, if it is ahead of ALONE by a paired t test over devices; else ALONE.

    The best candidate has the highest sum. Of those within one standard error of it, it is the one with the highest sum over
    all comparisons. If held-out samples do not show that it is ahead, CLOSED_FORM wins if all training samples show that it is.

    Args:
        scores: Of ALONE and of each candidate that is left.
        earlier: Scores at the rungs.
        entered: Number of candidates at the start of the race. One of so many may be ahead by chance.
        gained: As of `gained_by_samples`, which is tested at half of the level then.
    """
    totals, share = _totals(scores), FALSE_CHOICES / (2 if gained else 1)
    level = share / entered
    names = [name for name in totals if name != ALONE]
    if not names:
        return Decision(totals, (ALONE,), None, {}, level)
    near = [name for name in scores if name in names and (name == names[0] or not paired(names[0], name, scores).exceeds(1.0))]
    sums = {name: totals[name] for name in near}
    voters = set(scored_by_all(scores))  # devices that have left since, or were revoked, have no vote any more
    for compared in earlier if len(near) > 1 else ():
        then = _totals({name: {who: compared[name][who] for who in compared[name].keys() & voters} for name in near})
        sums = {name: math.fsum((sums[name], then[name])) for name in near}
    evidence = dict(sorted(sums.items(), key=lambda item: -item[1]))
    best = next(iter(evidence))
    difference = paired(best, ALONE, scores)
    if gained and difference.p >= level and gained.p < share:
        return Decision(totals, (CLOSED_FORM,), gained, evidence, share)
    return Decision(totals, (best if difference.p < level else ALONE,), difference, evidence, level)


def reported_scores(rows: Collection[Report]) -> tuple[DeviceScores, DeviceScores, DeviceScores]:
    """Return what devices reported, in nats by device.

    These are the likelihood of what they would keep, what the closed form gains, and the standard error of that gain.
    """

    def of(metric: str) -> DeviceScores:
        return {row.client: nats for row in rows if (nats := getattr(row, metric)) is not None}

    return of("likelihood_kept"), of("likelihood_closed_form"), of("likelihood_closed_form_error")


def scored_by_all(scores: Mapping[str, DeviceScores]) -> list[str]:
    """Return the devices that every candidate has scored, sorted."""
    return sorted(set.intersection(*(set(of) for of in scores.values()))) if scores else []


def _totals(scores: Mapping[str, DeviceScores]) -> dict[str, float]:
    """Return the candidates' sums over the devices that all have scored, from the best to the worst; ties stay in order."""
    devices: Sequence[str] = scored_by_all(scores)
    sums = {name: math.fsum(of[device] for device in devices) for name, of in scores.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Rung:
    """Comparison after a round.

    Attributes:
        round: The round.
        scores: Of ALONE and of each candidate in the race, by name and device.
        decision: What follows.
    """

    round: int
    scores: Mapping[str, Mapping[str, float]]
    decision: Decision


@dataclass(frozen=True)
class RaceResult:
    """Course of a race that is over.

    Attributes:
        rungs: All comparisons. The last one is after all rounds, with ALONE among the candidates.
        left_out: Why a candidate took no part, or was given up, by name.
    """

    rungs: Sequence[Rung]
    left_out: Mapping[str, str]

    @property
    def chosen(self) -> str:
        """Name of the winner."""
        return self.rungs[-1].decision.kept[0]

    @property
    def pays(self) -> bool:
        """True if a federation explains held-out samples better than training alone."""
        return self.chosen != ALONE

    def report(self) -> dict[str, Any]:
        """Return all scores and decisions, for JSON."""
        rungs = [{"round": rung.round, **asdict(rung.decision), "scores": dict(rung.scores)} for rung in self.rungs]
        return {"chosen": self.chosen, "pays": self.pays, "rungs": rungs, "left_out": dict(self.left_out)}

    def words(self) -> list[str]:
        """Return the course of the race as lines of text."""
        nothing = "auto: no evidence that federating pays here; devices keep their local models"
        return [*self.words_so_far(), f"auto chooses {self.chosen}" if self.pays else nothing]

    def words_so_far(self) -> list[str]:
        """Return the comparisons so far as lines of text."""
        lines = ["auto compares what devices would keep, by the likelihood of their held-out samples (nats; higher is better)"]
        lines += [f"auto leaves out {name}: {why}" for name, why in self.left_out.items()]
        return lines + [_words(rung, last=ALONE in rung.decision.totals) for rung in self.rungs]


def _words(rung: Rung, last: bool) -> str:
    totals = dict(rung.decision.totals)
    if ALONE in rung.scores and not last:
        totals[ALONE] = _totals(rung.scores)[ALONE]
    listed = ", ".join(f"{name} {nats:.1f}" for name, nats in totals.items())
    then = "" if last else f"; {' and '.join(rung.decision.kept)} {'go' if len(rung.decision.kept) > 1 else 'goes'} on"
    if (difference := rung.decision.difference) is None:
        return f"after round {rung.round}: {listed}{then}"
    error = "" if difference.error is None else f" with a standard error of {difference.error:.1f}"
    ahead = f"{difference.nats:.1f} ahead of" if difference.nats >= 0 else f"{-difference.nats:.1f} behind"
    between = f"{difference.first} is {ahead} {difference.second}{error}"
    tested = f" (p = {difference.p:.2g}, wanted below {rung.decision.level:.2g})" if last else ""
    tested += " by all training samples, out of fold" * difference.out_of_fold
    sums = ", ".join(f"{name} {nats:.1f}" for name, nats in rung.decision.evidence.items())
    together = f"; of candidates that are level, over all comparisons: {sums}" if len(rung.decision.evidence) > 1 else ""
    return f"after round {rung.round}: {listed}; {between}{tested}{then}{together}"
