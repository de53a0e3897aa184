"""Drift of a finished model: daily bets that its error on new samples is larger than it was at the end (`fedclient watch`).

The error at the end is not known, so there are bets against each error that it may have been, plus a tolerance (Podkopaev and
Ramdas, ICLR 2022). While the error of new samples is at most that, nobody gains for long: the capital is a martingale
(Waudby-Smith and Ramdas, JRSS B 2024), and ever exceeds 1 / h with a chance of at most h. What the test part says of an error
is a p-value P (Clopper and Pearson, Biometrika 1934). An alarm needs a capital of at least 1 / h(P) against each error, with
h(P) = min(1, (LEAST / P)^2). Since P is uniform at the true error, or larger, the chance of a false alarm is at most the
integral of h, 2 LEAST - LEAST^2 = CHANCE, however often one looks. A part of the money waits, for a change that comes late.

G errors, J bets. Nothing here leaves the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.durable import PRIVATE, read_small, write_file
from attune.common.errors import HomeMismatch, SettingError, ShardError
from attune.common.text import from_json
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.home import DeviceHome
from attune.fedclient.model.artifact import Model
from attune.fedclient.read_options import PLAIN, ReadOptions

FILE, MOST_BYTES = "drift.json", 64 << 20
CHANCE = 0.05  # of a false alarm
LEAST = 1 - (1 - CHANCE) ** 0.5  # p-value below which an error needs no bets
LEVELS = np.geomspace(1, LEAST, 41)  # p-values between which an error lies: G cells
ODDS = np.array([1.25, 1.5, 2, 4])  # by how much larger the bets say that the odds of a wrong answer are
RESERVE, LEAD = 0.5, 100  # share that waits at the start; after k looks RESERVE LEAD / (LEAD + k) waits
LARGEST_BOUND = 0.95  # an error above which nothing can be told from it


class DriftWatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """drift.json: what was seen of new samples under one model.

    Attributes:
        model: Digests of the model's files: another model is watched anew.
        samples: Samples of the test part.
        errors: How many of them the model has wrong.
        limits: The errors that the bets are against, (G,): each the largest of its cell, plus the tolerance.
        capitals: Logarithms of the capitals of bets, (G * J,).
        counted: New samples that have counted.
        wrong: How many of them the model has wrong.
        looks: Calls that brought new samples.
        alarm: After how many new samples the capital was first large enough; 0: it never was.
        seen: Digests of samples that have counted, and of those of the shard, which never count.
    """

    model: str
    samples: int
    errors: int
    limits: tuple[float, ...]
    capitals: tuple[float, ...]
    seen: tuple[str, ...]
    counted: int = 0
    wrong: int = 0
    looks: int = 0
    alarm: int = 0

    @property
    def limit(self) -> float:
        """The largest error that the test part allows, plus the tolerance."""
        return self.limits[-1]

    @property
    def words(self) -> str:
        """The state in words for the person at the device."""
        known = f"{self.errors} of {self.samples} test samples wrong at the end; up to {self.limit:.3f} wrong is no drift"
        if not self.counted:
            return f"no new samples yet; {known}"
        said = f"{self.wrong} of {self.counted} new samples wrong ({self.wrong / self.counted:.3f}); {known}"
        if self.alarm:
            return f"DRIFT, found after {self.alarm} new samples: {said}. Do not rely on this model until somebody has looked"
        return f"no drift found: {said}"


def begun(model: str, samples: int, errors: int, tolerance: float = 0.0, seen: Collection[str] = ()) -> DriftWatch:
    """Return a watch before the first new sample.

    Raises:
        SettingError: The limit is so large that no error can be told from it.
    """
    from scipy.stats import beta

    limit_G = beta.ppf(1 - LEVELS[1:], errors + 1, samples - errors) + tolerance if errors < samples else np.array([1.0])
    if limit_G[-1] > LARGEST_BOUND:
        raise SettingError(
            f"{samples} test samples, of which the model has {errors} wrong, and a tolerance of {tolerance:g} allow any error "
            f"up to {limit_G[-1]:.2f}: more test samples are needed to see drift"
        )
    capital = float(np.log((1 - RESERVE) / len(ODDS)))
    return DriftWatch(model, samples, errors, tuple(limit_G.tolist()), (capital,) * (len(limit_G) * len(ODDS)), tuple(seen))


def looked(watch: DriftWatch, wrong: int, samples: int) -> DriftWatch:
    """Return the watch after new samples, of which so many are wrong; their order does not matter."""
    if not samples:
        return watch
    capital_GJ, waits = np.reshape(watch.capitals, (-1, len(ODDS))), RESERVE * LEAD / (LEAD + watch.looks)
    if watch.looks:
        capital_GJ = np.logaddexp(capital_GJ, np.log(waits / (LEAD + watch.looks - 1) / len(ODDS)))
    capital_GJ = capital_GJ + wrong * np.log(ODDS) - samples * np.log1p(np.outer(watch.limits, ODDS - 1))
    capital_G = np.logaddexp(np.logaddexp.reduce(capital_GJ, 1), np.log(waits))
    counted, found_now = watch.counted + samples, bool((capital_G >= 2 * np.log(LEVELS[:-1] / LEAST)).all())
    return msgspec.structs.replace(
        watch, capitals=tuple(capital_GJ.ravel().tolist()), counted=counted, wrong=watch.wrong + wrong, looks=watch.looks + 1,
        alarm=watch.alarm or (counted if found_now else 0),
    )  # fmt: skip


def watch_new(
    home: DeviceHome, path: Path, tolerance: float = 0.0, reference: Path | None = None, table: ReadOptions = PLAIN,
    allow_models: Collection[str] = (),
) -> DriftWatch:  # fmt: skip
    """Count the samples of a file that are new, and return what is known now; it is durable in the device's home.

    A sample counts once, by its features and label, however often a file has it, and none of the device's own shard counts.

    Args:
        home: The device's home, with its finished model.
        path: Labelled samples, read as a shard is.
        tolerance: By how much the error may exceed the bound; it counts at the first call under a model.
        reference: The shard whose test part gives the bound; None: the device's.
        table: How tables are mapped.
        allow_models: Same as for `Model.load`.

    Raises:
        SettingError: The model predicts no single class a sample, or no drift could be seen.
        ShardError: Samples come in groups, or as in `load_shard`.
        HomeMismatch: The home has no shard, or what it has of the watch is damaged.
    """
    model = Model.load(home.model, allow_models=allow_models)
    info = model.info
    if info.task != "classes" or info.model.per_position:
        raise SettingError("watch counts wrong answers, so it is for models that give each sample one class")
    kept = home.path / FILE
    digest = hashlib.sha256(msgspec.json.encode(sorted(info.files.items()))).hexdigest()
    watch = _read(kept) if kept.exists() else None
    if watch is None or watch.model != digest:
        at_end = _shard_of(home, reference)
        shard = load_shard(at_end, options=info.options_for(at_end, table), held=home.held_rows())
        right = _right(model, shard)
        watch = begun(digest, len(right), int((~right).sum()), tolerance, sorted(set(_digests(_whole(shard)))))
    given = _whole(load_shard(path, options=info.options_for(path, table)))
    digests = _digests(given)
    known, first = set(watch.seen), {one: place for place, one in reversed(list(enumerate(digests)))}
    places = sorted(place for one, place in first.items() if one not in known)
    if places:
        right = _right(model, replace(given, test_x=given.test_x[places], test_y=given.test_y[places]))
        watch = looked(watch, int((~right).sum()), len(right))
        watch = msgspec.structs.replace(watch, seen=(*watch.seen, *(digests[place] for place in places)))
    write_file(kept, msgspec.json.encode(watch), PRIVATE)
    return watch


def _read(path: Path) -> DriftWatch:
    try:
        watch = from_json(read_small(path, MOST_BYTES), DriftWatch)
        if len(watch.capitals) == len(watch.limits) * len(ODDS) == (len(LEVELS) - 1) * len(ODDS):
            return watch
    except (OSError, msgspec.DecodeError):
        pass
    raise HomeMismatch(f"{path} is damaged: restore it, or remove it to watch the model anew")


def _shard_of(home: DeviceHome, reference: Path | None) -> Path:
    record = home.record()
    if reference is None and (record is None or record.data is None):
        raise HomeMismatch(f"{home.path} knows no shard: name the one that this device has trained on (--reference)")
    return reference or Path(record.data if record and record.data else "")


def _right(model: Model, shard: Shard) -> npt.NDArray[np.bool_]:
    if shard.test_groups is not None:
        raise ShardError(f"the samples of {shard.path} come in groups, so their errors are not independent, as bets need")
    return np.asarray(model.right(shard).numpy(), bool)


def _whole(shard: Shard) -> Shard:
    """Return the shard with all its samples in the test part."""
    x, y = (np.concatenate(parts) for parts in ((shard.train_x, shard.test_x), (shard.train_y, shard.test_y)))
    return replace(shard, test_x=x, test_y=y, test_groups=shard.groups)


def _digests(shard: Shard) -> list[str]:
    pairs = zip(shard.test_x.astype(np.float64), map(str, shard.test_y), strict=True)
    return [hashlib.sha256(x.tobytes() + y.encode()).hexdigest()[:16] for x, y in pairs]
