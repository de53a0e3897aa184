"""Evaluation on a device: the score of every model with which it could predict, and the blend that it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any

import msgspec
import torch

from attune.common.errors import Forbidden
from attune.common.exchange.messages import Order
from attune.common.metrics import CHOICES, KEPT_RIVALS, LIKELIHOODS, NETWORKS, OF_OTHERS, RIVALS, Choice, OtherScore
from attune.common.plan import Plan
from attune.fedclient.data.prepare import Prepared
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import Hooks
from attune.fedclient.work import baselines, comparison
from attune.fedclient.work.auroc import aurocs, compared_areas, has_cases, rarer, sensitivities, threshold_of
from attune.fedclient.work.blend import Member, answering, blended_logits, leave_one_out, sharing
from attune.fedclient.work.comparison import Floats
from attune.fedclient.work.dial import Dialled, Position, dialled
from attune.fedclient.work.executor import Jobs
from attune.fedclient.work.measures import Ranked, mean_score
from attune.fedclient.work.objectives.base import Tensors
from attune.fedclient.work.own_loop import Data, scored
from attune.fedclient.work.portfolio.federated import FederatedRidge
from attune.fedclient.work.portfolio.portfolio import Portfolio, held_of, samples_of
from attune.fedclient.work.task_measures import measure_of
from attune.fedclient.work.trainer import Seeds, Trainer
from attune.fedclient.work.weighing import Weighed, weighed


@dataclass(frozen=True)
class DeviceModels:
    """The tensors that an evaluation starts from.

    Attributes:
        theta: Those of the device's own model.
        received: What the server last served of it.
        common: The cold-start model; empty if the order does not name it.
        trained: The attended tensors as training left them, for the dial.
        solved: What the server last served of the closed form that joins blends; empty: nothing.
    """

    theta: Tensors
    received: Tensors
    common: Tensors
    trained: Tensors | None
    solved: Tensors
    given: Tensors


class Evaluation:
    """Evaluation of one device's models.

    Args:
        own_choice: Name of the method's model (baselines.own_name).
        blends: Whether the device may keep more than that model.
        dial: The components of each attended part; empty without a dial.
        portfolio: Returns the models that the device fits alone, or None. They are fitted where they are needed first.
    """

    def __init__(
        self, plan: Plan, data: Prepared, trainer: Trainer, rivals: baselines.Baselines, own_choice: Choice, blends: bool,
        dial: Mapping[str, Sequence[str]], hooks: Hooks, portfolio: Callable[[], Portfolio | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._portfolio, self._plan = portfolio, plan
        self._data, self._trainer, self._rivals, self.own_choice, self._dial = data, trainer, rivals, own_choice, dial
        self._classes, self._score, self._measure = plan.classes, hooks.evaluate, measure_of(plan)
        self._by_sample = hooks.evaluate is not None or not self._measure.one_score
        self._scores = len(data.test_x) > 0 if hooks.evaluate is not None else self._measure.can_score(data.test_y)
        if self.is_ranked:
            self._scores = has_cases(data.test_y.cpu().numpy(), len(plan.classes), data.test_groups)
        blends = blends and not plan.given  # else what is kept is the given model itself
        self._keeps_best, self._blends = blends, blends and plan.train.validation > 0
        self._scored_rounds = plan.train.scored_rounds
        self.constant = baselines.constant_answer(data, self._measure) if hooks.evaluate is None else None

    def accuracy(self, theta: Tensors, received: Tensors, seeds: Seeds, cancelled: Callable[[], bool]) -> Jobs[float | None]:
        """Return the accuracy of the own model on the test part; None if that cannot be scored."""
        data = self._data
        if not self._scores:
            return None
        prepared = yield from self._prepared(theta, received, seeds, cancelled)
        return (yield from self._trainer.accuracy(prepared, data.test_x, data.test_y))

    def compared(
        self, result: OrderResult, held: DeviceModels, order: Order, seeds: Seeds, cancelled: Callable[[], bool]
    ) -> Jobs[tuple[OrderResult, dict[str, Tensors]]]:
        """Return (the result with the accuracy of every model, the tensors of the blend's models beside the own one).

        Args:
            result: The result so far.
            held: The tensors to start from.
            order: The evaluation order. Its `prior` is what other devices found, as in blend.pseudo_counts.
            seeds: Values on which the seeds depend.
            cancelled: Returns whether the work was replaced.
        """
        data, theta = self._data, held.theta
        mixed = yield from self._dialled(held, seeds, cancelled)
        # The samples that set a dial flatter its model, unless other samples score it.
        is_flattered = mixed is not None and data.dial is None
        if mixed is not None:
            theta = theta | mixed.tensors
            result = msgspec.structs.replace(result, dial_mean=mixed.share("mean"), dial_own=mixed.share("own"))
        own_tensors = yield from self._prepared(theta, held.received, seeds, cancelled)
        candidates: baselines.Candidates = {
            self.own_choice: (self._trainer, own_tensors),
            **self._rivals.candidates(held.common),
        }
        portfolio = self._fitted(held)
        alone = {} if portfolio is None else {"alone": portfolio.candidates[portfolio.chosen]}
        judged = {**candidates, **alone}
        right = (yield from baselines.right_on_test(judged, data)) if self._scores else {}
        accuracies = {name: mean_score(scores) for name, scores in right.items()}
        others = [name for name in RIVALS if name in right and name != self.own_choice and self._by_sample]
        blend = Weighed({}, {})
        if self._trainer.predictor.scores_out_of_fold and portfolio is not None and self._keeps_best:
            blend = yield from self._beside_fitted(portfolio, held, own_tensors, order, seeds)
        elif self._blends:
            blending = candidates
            if is_flattered and portfolio is not None:
                # The blend has the dial's sources. The model before the dial takes the place of the mixture, so that the device
                # can tell how likely its held-out samples are.
                is_flattered = False
                undialled = yield from self._prepared(held.theta, held.received, seeds, cancelled)
                blending = {**candidates, self.own_choice: (self._trainer, undialled)}
            blend = yield from weighed(blending, self.own_choice, data, order.prior, portfolio)
            candidates = blending if blend.members else candidates
        members = blend.members
        said = {name: blend.likelihood[name] for name in CHOICES if name in blend.likelihood}
        said = said if not is_flattered and len(said) > 1 else {}
        likelihood_kept, gained, error = None, None, None
        if order.round in self._scored_rounds:
            likelihood_kept = yield from self._scored(blend, candidates, order)
            gained, error = portfolio.gained if portfolio is not None else (None, None)
        blended = (yield from self._blended(list(members.values()))) if members and right else None
        against: list[dict[str, Any]]
        against = [comparison.compared(right[self.own_choice], right[name], RIVALS[name], data.test_groups) for name in others]
        if right:
            kept = right[self.own_choice] if blended is None else blended
            against += [comparison.compared(kept, right[name], KEPT_RIVALS[name], data.test_groups) for name in others]
            against.append((yield from self._aurocs(list(members.values()), judged)))
        result = msgspec.structs.replace(
            result,
            accuracy_before=accuracies.get(self.own_choice),
            accuracy_common=accuracies.get("common"),
            accuracy_local=accuracies.get("local"),
            accuracy_alone=accuracies.get("alone"),
            accuracy_kept=accuracies.get(self.own_choice) if blended is None else mean_score(blended),
            kept=_kept(members) or self.own_choice,
            weights={name: member.weight for name, member in members.items()},
            sharpness={name: member.sharpness for name, member in members.items()},
            cases=rarer(data.test_y.cpu().numpy() == 1, data.test_groups) if self._ranks_two else None,
            threshold=(yield from self._threshold(list(members.values()) or [Member(1.0, *candidates[self.own_choice])])),
            validation_samples=len(next(iter(blend.probability.values()))) if blend.likelihood else 0,
            fitted=dict(blend.fitted),
            likelihood_kept=likelihood_kept,
            likelihood_closed_form=gained,
            likelihood_closed_form_error=error,
            **{LIKELIHOODS[name]: value for name, value in said.items()},
            **{name: value for numbers in against for name, value in numbers.items()},
        )
        beside = {name for name in members if name != self.own_choice} | ({self.own_choice} if mixed is not None else set())
        return result, {name: members[name].tensors if name in members else candidates[name][1] for name in sorted(beside)}

    def others(self, network: Tensors, others: Mapping[str, Tensors]) -> Jobs[dict[str, OtherScore]]:
        """Return the scores of other devices' networks on the test part, and whether they beat the device's own network.

        Args:
            network: The own one; empty: there is none to compare with.
            others: Theirs, by device.
        """
        data, event_N = self._data, self._data.test_y.cpu().numpy() == 1
        judged = {name: (self._rivals.trainer, tensors) for name, tensors in {**others, "": network}.items() if tensors}
        right = (yield from baselines.right_on_test(judged, data)) if self._scores else {}
        share_of: dict[str, Floats] = {}
        for name in right if self.is_ranked and self._ranks_two else ():
            share_of[name] = (yield from sharing([Member(1.0, *judged[name])], data.test_x)).double().nan_to_num(0.0).numpy()
        scores: dict[str, OtherScore] = {}
        for name in filter(None, right):
            numbers: dict[str, Any] = {}
            if network and share_of:
                theirs_N, own_N = share_of[name][:, 1], share_of[""][:, 1]
                numbers = compared_areas(theirs_N, own_N, event_N, OF_OTHERS, data.test_groups)
            elif network and self._by_sample:
                numbers = comparison.compared(right[name], right[""], OF_OTHERS, data.test_groups)
            numbers.pop("test_groups", None)  # of the device, which reports it once
            scores[name] = OtherScore(score=mean_score(right[name]), **numbers)
        return scores

    def _beside_fitted(
        self, portfolio: Portfolio, held: DeviceModels, own_tensors: Tensors, order: Order, seeds: Seeds
    ) -> Jobs[Weighed]:
        """Return the blend of fitted models and an own model that predicts its training samples out of fold as these do."""
        data = self._data
        scores = yield from self._trainer.out_of_fold(held.theta, held.received, data.train_x, data.train_y, seeds)
        placed = torch.full((len(data.places), scores.shape[1]), torch.nan, dtype=scores.dtype)
        placed[torch.from_numpy(data.places[: len(scores)])] = scores
        against = portfolio.against(placed)
        candidates: baselines.Candidates = {self.own_choice: (self._trainer, own_tensors)}
        if against is None:
            return (yield from weighed(candidates, self.own_choice, data, order.prior, portfolio))
        fit, beside = against
        return (yield from weighed(candidates, self.own_choice, data, order.prior, beside, {self.own_choice: fit}))

    def _scored(self, blend: Weighed, candidates: baselines.Candidates, order: Order) -> Jobs[float | None]:
        """Return the log-likelihood of the held-out samples under what the device would keep; None without such samples.

        In a blend each sample is scored with weights that are found without it.
        """
        data, probability = self._data, blend.probability
        if not len(data.validation_x):
            return None
        if not probability:
            trainer, tensors = candidates[self.own_choice]
            fit = yield from trainer.calibrated(tensors, data.validation_x, data.validation_y, data.validation_weight)
            probability = {self.own_choice: fit.probability.nan_to_num(0.0)}
        each_V = leave_one_out(probability, order.prior, data.validation_weight, data.validation_groups)
        return float(each_V.sum() if data.validation_weight is None else each_V @ data.validation_weight.numpy())

    @property
    def federated(self) -> FederatedRidge:
        """The closed form of all devices' sums, which joins the blend where the plan has it.

        It is not kept: its features take 4 KB of each sample, of every device of a simulation.
        """
        samples = samples_of(self._data, self._plan, torch.device("cpu"))
        return FederatedRidge(self._plan.model, samples, held_of(self._data), self._data.to_ranges)

    def sums(self, one_sum: bool) -> Tensors:
        """Return what the device hands in of it, as FederatedRidge.sums; zeros if it scales its columns by itself.

        Raises:
            Forbidden: Then it is in no sum of many devices, who count on it.
        """
        values = self.federated.sums(one_sum)
        if self._data.in_common:
            return values
        if one_sum:
            raise Forbidden("this device scales its columns by itself, and is in no sum over samples")
        return {name: torch.zeros_like(tensor) for name, tensor in values.items()}

    def _fitted(self, held: DeviceModels) -> Portfolio | None:
        """Return the models that the device fits, with those of the closed form."""
        portfolio = self._portfolio()
        if portfolio is None or not held.solved or not self._data.in_common:
            return portfolio
        return portfolio.joined(self.federated.models(held.solved, held.given))

    def _prepared(self, theta: Tensors, received: Tensors, seeds: Seeds, cancelled: Callable[[], bool]) -> Jobs[Tensors]:
        """Return the own model, ready to predict."""
        data = self._data
        return (yield from self._trainer.preparing(theta, received, data.train_x, data.train_y, seeds, cancelled))

    def _dialled(self, held: DeviceModels, seeds: Seeds, cancelled: Callable[[], bool]) -> Jobs[Dialled | None]:
        """Return the dial's choice for the attended part; None without a dial or without held-out samples."""
        set_by = self._data.dial_samples
        x, y, weight = set_by.x, set_by.y, set_by.weight
        if not self._dial or not len(x):
            return None

        def probability(part: Tensors) -> Jobs[torch.Tensor]:
            prepared = yield from self._prepared(held.theta | part, held.received, seeds, cancelled)
            return (yield from self._trainer.calibrated(prepared, x, y, weight)).probability

        own_tensors = self._rivals.local or held.trained
        values: dict[Position, Tensors | None] = {"attended": held.theta, "mean": held.common, "own": own_tensors}
        known = {position: tensors for position, tensors in values.items() if tensors}
        return (yield from dialled(self._dial, known, probability, len(x), weight))

    @property
    def scores_by_plan(self) -> bool:
        """True if models are not scored by a function of the device's owner."""
        return self._score is None

    @property
    def is_ranked(self) -> bool:
        """True if models are scored by AUROC (`train.score`)."""
        return isinstance(self._measure, Ranked) and self._score is None

    @property
    def _ranks(self) -> bool:
        """True if the device ranks samples by the probability of a class."""
        return self._plan.task == "classes" and self._data.test_y.dim() == 1 and self._score is None

    @property
    def _ranks_two(self) -> bool:
        return self._ranks and len(self._classes) == 2

    def _threshold(self, members: Sequence[Member]) -> Jobs[float | None]:
        """Return the probability from which an event is called, by held-out samples; None without both of two classes."""
        event_N = self._data.validation_y.cpu().numpy() == 1
        if not self._ranks_two or len(set(event_N.tolist())) < 2:
            return None
        return threshold_of((yield from sharing(members, self._data.validation_x)).double().numpy()[:, 1], event_N)

    def _aurocs(self, members: Sequence[Member], judged: baselines.Candidates) -> Jobs[dict[str, Any]]:
        """Return the AUROCs of what is kept and of ordinary models alone, with their comparison; empty where there are none.

        Where devices are scored by AUROC, the kept and the own model are compared with each rival.
        """
        data, y_N = self._data, self._data.test_y.cpu().numpy()
        if not self._ranks or not has_cases(y_N, len(self._classes), data.test_groups):
            return {}
        others = [name for name in RIVALS if name in judged and name != self.own_choice and (self.is_ranked or name == "alone")]
        share_of: dict[str, Floats] = {}
        for name, some in [*((name, [Member(1.0, *judged[name])]) for name in (self.own_choice, *others)), ("kept", members)]:
            if some:
                share_of[name] = (yield from sharing(some, data.test_x)).double().nan_to_num(0.0).numpy()
        own_NC = share_of[self.own_choice]
        kept_NC = share_of.get("kept", own_NC)
        numbers: dict[str, Any] = dict(aurocs(kept_NC, share_of.get("alone"), y_N, data.test_groups))
        if self._ranks_two and not self._plan.one_sum:
            of_two = {"kept": kept_NC} | ({"alone": share_of["alone"]} if "alone" in share_of else {})
            numbers["roc"] = {name: sensitivities(share_NC[:, 1], y_N == 1) for name, share_NC in of_two.items()}
        if self.is_ranked:
            for name, (mine_NC, rivals) in product(others, ((own_NC, RIVALS), (kept_NC, KEPT_RIVALS))):
                numbers |= compared_areas(mine_NC[:, 1], share_of[name][:, 1], y_N == 1, rivals[name], data.test_groups)
        return numbers

    def _blended(self, members: Sequence[Member]) -> Jobs[torch.Tensor]:
        """Return what the blend predicts of the test part, as Trainer.right."""
        data = self._data
        if self._score is None:
            return self._measure.right((yield from answering(members, data.test_x)), data.test_y.cpu())
        return scored(self._score, lambda x: blended_logits(members, x), Data(data.test_x, data.test_y, self._classes))


def _kept(members: Mapping[str, Member]) -> Choice | None:
    """Return the model that counts most in a blend, the fitted ones together; None without a blend."""
    weights = {name: members[name].weight for name in NETWORKS if name in members}
    if alone := math.fsum(member.weight for name, member in members.items() if name not in NETWORKS):
        weights["alone"] = alone
    return max(weights.items(), key=itemgetter(1))[0] if weights else None
