"""Ledger of the privacy that a device has spent on its data, and the secret from which its noise comes.

It is charged before an order trains. It belongs to the data: all homes of this user that train on the same path or on the same
bytes share it, and changed data inherit what was spent, unless the device's owner says that they are new. Forgetting a charge
would break the guarantee, so it is never repaired silently.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from filelock import FileLock

from attune.common.config import PrivacySettings
from attune.common.durable import write_file
from attune.common.errors import AttuneError, HomeMismatch, SettingError
from attune.common.privacy.accountant import NoisySteps, epsilon_of, noise_for
from attune.common.privacy.noise import SECRET_BYTES, key_of
from attune.common.protocol import SPENT
from attune.common.site_statistics import NoisyLayout
from attune.common.text import from_json, newer_format

LEAST_LEFT = 0.01  # share of a budget; with less, the noise would drown everything
METRICS_SHARE = 0.1  # of the epsilon of a run, if the metrics of its orders leave with noise
STATISTICS = "{federation}/statistics {layout}"  # stands where a run's name does, for statistics with noise


class BudgetSpent(AttuneError):
    """The device has spent the privacy budget that its plan or its owner allows, so it trains no more.

    What to do: No action is needed. The device evaluates and predicts as before.
    """

    kind = "budget-spent"


class Attempt(msgspec.Struct, frozen=True):
    """An order that was started: its id, and the digest of everything from which it starts."""

    order_id: str
    inputs: str


class RunCharges(msgspec.Struct):
    """Charges of one run with one mechanism.

    Attributes:
        run: The federation and its run.
        rate: Chance of each unit to be in a step.
        noise: Noise multiplier.
        steps: Steps of an order.
        orders: Most orders for which the noise is set.
        delta: Chance that the guarantee fails.
        epsilon: Budget of the data; None: not limited.
        others: Orders of other runs that were started when the noise was set.
        metrics: Noise multiplier of the metrics of an order; 0: they do not leave the device.
        attempts: The orders that were started.
    """

    run: str
    rate: float
    noise: float
    steps: int
    orders: int
    delta: float
    epsilon: float | None = None
    others: int = 0
    metrics: float = 0.0
    attempts: list[Attempt] = []

    @property
    def mechanism(self) -> tuple[str, float, int, float, bool]:
        """The mechanism whose charges these are, by which they are found again."""
        return self.run, self.rate, self.steps, self.delta, self.metrics > 0

    def counts_with(self, other: RunCharges) -> bool:
        """Return whether attempts of both are charged alike, so that they can be counted together."""
        return (self.mechanism, self.noise, self.metrics) == (other.mechanism, other.noise, other.metrics)

    def spent(self, orders: int | None = None) -> list[NoisySteps]:
        """Return what these orders cost; None: those that were started."""
        return _cost(self.rate, self.noise, self.steps, self.metrics, len(self.attempts) if orders is None else orders)


class LedgerContent(msgspec.Struct):
    """Content of ledger.json.

    Attributes:
        secret: Hexadecimal.
        paths: Where the data have lain.
        digests: Of the data.
        runs: What was spent.
        is_new: The owner has said that these data are new.
        format: Version of the file.
    """

    secret: str
    paths: list[str] = []
    digests: list[str] = []
    runs: list[RunCharges] = []
    is_new: bool = False
    format: int = 1

    def take(self, runs: Sequence[RunCharges]) -> None:
        """Add the charges of another ledger. What both have is counted once."""
        for charges in runs:
            same = next((kept for kept in self.runs if kept.counts_with(charges)), None)
            if same is None:
                self.runs.append(msgspec.structs.replace(charges, attempts=list(charges.attempts)))
            else:
                same.attempts += [attempt for attempt in charges.attempts if attempt not in same.attempts]


class PrivacyLedger:
    """The ledger of one device's data.

    Args:
        place: Folder of the ledger; None: it is in memory, and ends with the process.
        content: What it holds, in memory.
    """

    def __init__(self, place: Path | None, content: LedgerContent) -> None:
        self._place, self._content = place, content

    @classmethod
    def in_memory(cls, secret: bytes) -> PrivacyLedger:
        """Return an empty ledger of a simulated device."""
        return cls(None, LedgerContent(secret.hex()))

    @classmethod
    def of_data(cls, root: Path, path: Path, digest: str, is_new: bool = False) -> PrivacyLedger:
        """Return the ledger of these data; an empty one if they were never trained on with noise.

        Args:
            root: Folder of all ledgers.
            path: Where the data lie.
            digest: Digest of the data.
            is_new: The owner says that data with another digest under the same path are new.

        Raises:
            HomeMismatch: A ledger is damaged.
        """
        where = str(path.expanduser().resolve())
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(root / "lock"):
            ledgers = {file.parent: _read(file) for file in sorted(root.glob("*/ledger.json"))}
            same = [place for place, known in ledgers.items() if digest and digest in known.digests]
            before = [place for place, known in ledgers.items() if where in known.paths and place not in same]
            if is_new and not same:
                for place in before:  # the old data may come back at another place, and their charges with them
                    with cls(place, ledgers[place])._changing() as old:
                        old.paths.remove(where)
                before = []
            if not (places := [*same, *before]):
                places = [root / secrets.token_hex(8)]
                _write(places[0], LedgerContent(secrets.token_hex(SECRET_BYTES), is_new=is_new))
            ledger = cls(places[0], LedgerContent(""))
            with ledger._changing() as content:
                for other in places[1:]:  # data that were in two ledgers: each has spent what both have
                    content.take(ledgers[other].runs)
                content.paths = list(dict.fromkeys([*content.paths, where]))
                content.digests = list(dict.fromkeys([*content.digests, *([digest] if digest else [])]))
        return ledger

    def begin(self, run: str, privacy: PrivacySettings, rate: float, steps: int, metrics: bool = False) -> RunCharges:
        """Return the charges of a run, with its noise: set at its first order for the most orders that are left.

        Args:
            run: The federation and its run.
            privacy: The plan's settings.
            rate: Chance of each unit to be in a step.
            steps: Steps of an order.
            metrics: The metrics of its orders leave with noise.

        Raises:
            SettingError: dp-accounting is not installed; or there is no budget of which metrics could have a share.
        """
        with self._changing() as content:
            same = [charges for charges in content.runs if charges.run == run]
            for charges in same:
                if charges.mechanism == (run, rate, steps, privacy.delta, metrics):
                    return charges
            left = max(0, privacy.orders - sum(len(charges.attempts) for charges in same))
            metrics_noise = _noise_of_metrics(privacy, rate, steps, max(1, left)) if metrics else 0.0
            reserved = _reserved_statistics(content, run, privacy)
            noise, orders = self._mechanism(content, privacy, rate, steps, left, metrics_noise, reserved)
            others = sum(len(charges.attempts) for charges in content.runs)
            charges = RunCharges(run, rate, noise, steps, orders, privacy.delta, privacy.epsilon, others, metrics_noise)
            content.runs.append(charges)
            return charges

    def check_home(self, run: RunCharges, orders: int) -> None:
        """Check that a home has not trained more orders of this run than the ledger has charged.

        Raises:
            HomeMismatch: It has: this is an older copy of the ledger, or another one.
        """
        charged = sum(len(charges.attempts) for charges in self._content.runs if charges.run == run.run)
        if self._place is not None and not self._content.is_new and charged < orders:
            raise HomeMismatch(
                f"the privacy ledger {self._place} has {charged} orders of this run, and this device has trained {orders}: "
                "it is an older copy, or was not copied with the home. Restore the newest one: no other says what was spent. "
                "If these data are of other people than before, say --new-data"
            )

    def charge(self, run: RunCharges, order_id: str, inputs: str, started: int = 0, most_epsilon: float | None = None) -> bytes:
        """Charge an order, durably, and return the key of its noise. The same order with the same inputs costs nothing more.

        Args:
            run: What `begin` returned.
            order_id: The order.
            inputs: Digest of everything that its training depends on besides the data.
            started: Orders that the device knows to have started, if the ledger was in memory.
            most_epsilon: What may be spent on these data in all; None: not limited.

        Raises:
            BudgetSpent: So many orders were started already, or other runs have spent too much.
            DiskFull: The charge cannot be kept.
        """
        attempt = Attempt(order_id, inputs)
        with self._changing() as content:
            charges = next(kept for kept in content.runs if kept.counts_with(run))
            if attempt not in charges.attempts:
                most = min((limit for limit in (charges.epsilon, most_epsilon) if limit is not None), default=math.inf)
                if max(len(charges.attempts), started) >= charges.orders or not _leaves_one(content, charges, most):
                    raise BudgetSpent(SPENT)
                charges.attempts.append(attempt)
            number = charges.attempts.index(attempt)
        return key_of(bytes.fromhex(content.secret), run.run, number, order_id, inputs)

    def charge_statistics(
        self, layout: NoisyLayout, noise: float, inputs: str, most_epsilon: float | None, running: str = ""
    ) -> bytes:
        """Charge a release of statistics, durably, and return the key of its noise.

        The same sums in the same layout cost nothing more, and get the same noise. Other sums, of data that have changed, are
        charged again: with the same noise their difference would be the change.

        Args:
            layout: Everything that the release depends on besides the data.
            noise: Noise multiplier of the release.
            inputs: Digest of the sums before the noise.
            most_epsilon: What may be spent on these data in all; None: not limited.
            running: The federation and its run, of which the orders to come are counted as spent; empty: none.

        Raises:
            BudgetSpent: The budget does not allow it.
            DiskFull: The charge cannot be kept.
        """
        run, attempt = STATISTICS.format(federation=layout.federation, layout=layout.digest), Attempt("statistics", inputs)
        with self._changing() as content:
            known = [kept for kept in content.runs if kept.run == run]
            charges = known[0] if known else RunCharges(run, 1.0, noise, 1, 0, layout.delta, layout.budget)
            if attempt not in charges.attempts:
                others = [kept for kept in content.runs if kept is not charges]
                spent = [cost for kept in others for cost in kept.spent(kept.orders if kept.run == running else None)]
                cost = epsilon_of([*spent, *charges.spent(len(charges.attempts) + 1)], layout.delta)
                if most_epsilon is not None and cost > most_epsilon * (1 + 1e-6):
                    raise BudgetSpent(f"{SPENT}, or planned for training: no statistics can be paid for")
                charges.attempts.append(attempt)
                content.runs += [] if known else [charges]
        return key_of(bytes.fromhex(content.secret), run, inputs)

    def epsilon(self, delta: float) -> float:
        """Return what was spent on these data in all runs, those of other processes too."""
        with self._changing() as content:
            spent = [cost for charges in content.runs for cost in charges.spent()]
        return epsilon_of(spent, delta)

    def planned(self, run: RunCharges) -> float:
        """Return what will have been spent on these data after all orders of this run."""
        with self._changing() as content:
            others = [cost for charges in content.runs if not charges.counts_with(run) for cost in charges.spent()]
        return epsilon_of([*others, *run.spent(run.orders)], run.delta)

    @staticmethod
    def _mechanism(
        content: LedgerContent,
        privacy: PrivacySettings,
        rate: float,
        steps: int,
        left: int,
        metrics: float,
        reserved: Sequence[NoisySteps],
    ) -> tuple[float, int]:
        """Return the noise, and how many orders the budget allows with it."""
        spent = (*(cost for charges in content.runs if charges.attempts for cost in charges.spent()), *reserved)
        if privacy.epsilon is None or not left:
            return privacy.noise or 0.0, left
        if privacy.noise is None:
            before = (*spent, *_cost(rate, 0.0, 0, metrics, left))
            if before and epsilon_of(before, privacy.delta) >= privacy.epsilon * (1 - LEAST_LEFT):
                return 0.0, 0
            return noise_for(privacy.epsilon, privacy.delta, rate, steps * left, before), left
        low, high = 0, left  # the budget ends within them
        while low < high:
            middle = (low + high + 1) // 2
            cost = epsilon_of([*spent, *_cost(rate, privacy.noise, steps, metrics, middle)], privacy.delta)
            low, high = (middle, high) if cost <= privacy.epsilon else (low, middle - 1)
        return privacy.noise, low

    @contextlib.contextmanager
    def _changing(self) -> Iterator[LedgerContent]:
        """Hold the ledger, as it is on disk now, and write it at the end if it has changed."""
        if self._place is None:
            yield self._content
            return
        with FileLock(self._place / "lock"):
            self._content = _read(self._place / "ledger.json")
            before = msgspec.json.encode(self._content)
            yield self._content
            if msgspec.json.encode(self._content) != before:
                _write(self._place, self._content)


def _reserved_statistics(content: LedgerContent, run: str, privacy: PrivacySettings) -> list[NoisySteps]:
    """Return what statistics of this plan may still cost, so that training leaves it; nothing once some were charged."""
    federation = run.rpartition("/")[0]
    if privacy.statistics_epsilon is None or any(
        kept.run.startswith(STATISTICS.format(federation=federation, layout="")) for kept in content.runs
    ):
        return []
    return [NoisySteps(1.0, noise_for(privacy.statistics_epsilon, privacy.delta, 1.0, 1), 1)]


def _leaves_one(content: LedgerContent, charges: RunCharges, most: float) -> bool:
    """Return whether the budget `most` allows one order more, if other runs have spent since the noise was set."""
    others = [kept for kept in content.runs if kept is not charges]
    if not math.isfinite(most) or sum(len(kept.attempts) for kept in others) <= charges.others:
        return True
    one_more = charges.spent(len(charges.attempts) + 1)
    return epsilon_of([*(cost for kept in others for cost in kept.spent()), *one_more], charges.delta) <= most


def _cost(rate: float, noise: float, steps: int, metrics: float, orders: int) -> list[NoisySteps]:
    """Return what orders cost: their steps, and the metrics of each one, in which all units are."""
    return [NoisySteps(rate, noise, steps * orders)] * bool(steps) + [NoisySteps(1.0, metrics, orders)] * bool(metrics)


def _noise_of_metrics(privacy: PrivacySettings, rate: float, steps: int, orders: int) -> float:
    """Return the noise multiplier with which the metrics of all orders cost METRICS_SHARE of the budget.

    Raises:
        SettingError: There is no budget.
    """
    budget = privacy.epsilon
    if budget is None:
        budget = epsilon_of([NoisySteps(rate, privacy.noise or 0.0, steps * orders)], privacy.delta)
    if not math.isfinite(budget):
        raise SettingError("metrics leave with noise only where training has a finite epsilon: say --metrics none or all")
    return noise_for(METRICS_SHARE * budget, privacy.delta, 1.0, orders)


def _read(path: Path) -> LedgerContent:
    try:
        text = path.read_bytes()
        if newer := newer_format(text, path, "fedclient"):
            raise HomeMismatch(newer)
        return from_json(text, LedgerContent)
    except (OSError, msgspec.DecodeError) as error:
        raise HomeMismatch(
            f"the privacy ledger {path} cannot be read ({error}). Restore it from a backup: without it nobody knows what was "
            "spent"
        ) from None


def _write(place: Path, content: LedgerContent) -> None:
    write_file(place / "ledger.json", msgspec.json.encode(content))
