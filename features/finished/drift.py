"""Drift of a finished model: daily bets that its error on new samples is larger than it was at the end (`fedclient watch`).

The error at the end has an upper bound from the test part (Clopper and Pearson, Biometrika 1934). While the error of new
samples is at most that bound plus a tolerance (Podkopaev and Ramdas, ICLR 2022), nobody who bets against it gains for long:
the capital of all bets is a martingale (Waudby-Smith and Ramdas, JRSS B 2024), and exceeds 1 / chance only with that chance,
however often one looks. J bets; bet 0 keeps its stake as a reserve. Nothing here leaves the device.
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
OF_BOUND, OF_BETS = 0.03, 0.02  # chances that the bound is too low, and that the bets are right by luck: at most 5 % together
RESERVE = 0.5  # of the capital at the start; from it each look stakes a share anew, for a change that comes late
SHARE = 0.01
PARTS = np.concatenate([[0.0], np.geomspace(0.05, 0.95, 12)])  # of the largest stake that cannot lose everything
LARGEST_BOUND = 0.95  # an error above which nothing can be told from it


class DriftWatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """drift.json: what was seen of new samples under one model.

    Attributes:
        model: Digests of the model's files: another model is watched anew.
        samples: Samples of the test part.
        errors: How many of them the model has wrong.
        limit: The error that the bets are against: the bound plus the tolerance.
        capitals: Logarithm of the capital of each bet, (J,).
        counted: New samples that have counted.
        wrong: How many of them the model has wrong.
        looks: Calls that brought new samples.
        alarm: After how many new samples the capital was first above 1 / OF_BETS; 0: it never was.
        seen: Digests of samples that have counted, and of those of the shard, which never count.
    """

    model: str
    samples: int
    errors: int
    limit: float
    capitals: tuple[float, ...]
    seen: tuple[str, ...]
    counted: int = 0
    wrong: int = 0
    looks: int = 0
    alarm: int = 0

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

    bound = float(beta.ppf(1 - OF_BOUND, errors + 1, samples - errors)) if errors < samples else 1.0
    if bound + tolerance > LARGEST_BOUND:
        raise SettingError(
            f"{samples} test samples, of which the model has {errors} wrong, and a tolerance of {tolerance:g} allow any error "
            f"up to {bound + tolerance:.2f}: more test samples are needed to see drift"
        )
    stakes = np.append(RESERVE, np.full(len(PARTS) - 1, (1 - RESERVE) / (len(PARTS) - 1)))
    return DriftWatch(model, samples, errors, bound + tolerance, tuple(np.log(stakes).tolist()), tuple(seen))


def looked(watch: DriftWatch, wrong: int, samples: int) -> DriftWatch:
    """Return the watch after new samples, of which so many are wrong; their order does not matter."""
    if not samples:
        return watch
    capital_J = np.array(watch.capitals)
    if watch.looks:
        capital_J[1:] = np.logaddexp(capital_J[1:], capital_J[0] + np.log(SHARE / (len(PARTS) - 1)))
        capital_J[0] += np.log1p(-SHARE)
    stake_J = PARTS / watch.limit
    capital_J += wrong * np.log1p(stake_J * (1 - watch.limit)) + (samples - wrong) * np.log1p(-stake_J * watch.limit)
    counted = watch.counted + samples
    found_now = float(np.logaddexp.reduce(capital_J)) >= -np.log(OF_BETS)
    return msgspec.structs.replace(
        watch, capitals=tuple(capital_J.tolist()), counted=counted, wrong=watch.wrong + wrong, looks=watch.looks + 1,
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
        if len(watch.capitals) == len(PARTS):
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
