"""Typed settings from TOML and flags: an unknown key, a wrong type or a value out of range is an error that names it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from attune.common.errors import SettingError, nearest

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Decay = Annotated[float, msgspec.Meta(gt=0, le=1)]
Encoding = Literal["", "bf16", "int8", "zstd"]  # attune.common.wire.encodings says what each does

S = TypeVar("S", bound=msgspec.Struct)


class TrainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Local training on a device. The defaults were chosen on validation data: benchmarks/results/settings.csv."""

    lr: Positive = 0.03
    momentum: Share = 0.9
    weight_decay: NonNegative = 0.0
    batch_size: Count = 32
    local_epochs: Count = 5
    local_steps: CountOrZero = 0  # mini-batch steps instead of epochs; 0: by epochs
    clip_norm: NonNegative = 1.0  # gradient norm; 0: no clipping
    mixed_precision: Literal["off", "bf16"] = "off"
    validation: Share = 0.1  # of a device's training samples, held out to choose which model it keeps; 0: no choice
    # Later than version 1: left out of the plan where they are not set.
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"] | msgspec.UnsetType = msgspec.UNSET  # unset: sgd
    schedule: Literal["constant", "cosine", "linear"] | msgspec.UnsetType = msgspec.UNSET  # of the rate within an order
    lr_decay: Decay | msgspec.UnsetType = msgspec.UNSET  # factor of the rate from one round to the next
    augment: tuple[Literal["flip", "crop", "noise", "erase"], ...] | msgspec.UnsetType = msgspec.UNSET  # images only
    evaluate: bool | msgspec.UnsetType = msgspec.UNSET  # score before and after training; unset: true

    def in_round(self, number: int) -> TrainSettings:
        """With the rate of this round; the first one is 1."""
        if self.lr_decay is msgspec.UNSET or number < 2:
            return self
        return msgspec.structs.replace(self, lr=self.lr * self.lr_decay ** (number - 1))


Days = Annotated[float, msgspec.Meta(ge=0.0007)]  # a minute


class RoundSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which devices take part in a round, and when it closes."""

    rounds: Count = 40
    clients: CountOrZero = 0  # sampled for a round; 0: all connected devices
    min_clients: Count = 2  # devices needed before a round starts
    quorum: CountOrZero = 0  # updates that are enough at the deadline; 0: as many as min_clients, at most the cohort
    deadline_s: Positive = 600.0
    grace_s: Positive = 30.0  # a round that has its quorum waits no longer for a disconnected device
    stall_s: NonNegative = 300.0  # without progress for so long, a device no longer holds a round that has its quorum; 0: off
    replace_after_s: float = 0.0  # away for so long, a sampled device is replaced by an idle one; 0: grace_s, below 0: never
    over_selection: NonNegative = 0.0  # share of extra devices to sample; the first `clients` updates count
    take_back: NonNegative = 10.0  # times its last median, the devices' loss undoes the round before; 0: never
    train: Literal["sampled", "all"] = "sampled"
    encoding: Encoding = ""  # of what devices hand in, and zstd also of what they are served; empty: none
    encodings: dict[str, Encoding] = {}  # the same, of single parts of the method
    served: Literal["", "zstd"] = ""  # encoding of what devices are served, of all parts; empty: as `encoding` says
    evaluate_every: CountOrZero = 0  # interval, in rounds, of evaluations on all devices; the end is always evaluated
    evaluate_last: CountOrZero = 0  # do these evaluations only in this number of last rounds; 0: in all
    # All devices also evaluate after each of this number of last rounds: what they find in the one before weighs in the last.
    evaluate_each_last: CountOrZero = 2
    adapt_rounds: CountOrZero = 0  # rounds for newcomers to a finished federation
    adapt: Literal["personal", "embedding", "hypernetwork", "all"] = "personal"  # what newcomers train in these rounds


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on what a peer can send, and how soon the server notices a silent peer."""

    max_blob_bytes: Count = 8 << 30
    max_model_bytes: Count = 4 << 30  # of the model that the devices' data ask for
    max_update_norm: NonNegative = 0.0  # L2 norm of an update's change from what was served; 0: no limit
    inline_bytes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1 << 16  # 1 Mbit/s carries it within a beat
    keepalive_s: Positive = 2.0
    handshake_s: Positive = 10.0  # from a connection to its first call
    watchdog_s: NonNegative = 300.0  # without headway of a step, the server says that it is not healthy; 0: never
    certificate_days: Days = 90.0
    threads: CountOrZero = 0  # for tensors; 0: one fewer than the machine has cores, which leaves one to the network
    device: str = "auto"  # for the aggregators' large products: auto (a GPU, if there is one), cpu, cuda, cuda:N or mps


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole federation.toml."""

    seed: int = 0
    data: dict[str, Any] = {}  # DataSettings: what everybody's data must be
    method: dict[str, Any] = {}  # name, and the options of its parts: checked by common.methods
    model: dict[str, Any] = {}  # name, and the architecture's options: checked by common.models
    train: dict[str, Any] = {}  # TrainSettings over the method's defaults
    round: dict[str, Any] = {}  # RoundSettings over the method's defaults
    server: dict[str, Any] = {}  # ServerSettings


def convert(kind: type[S], values: Mapping[str, Any], where: str) -> S:
    """`values` as a typed struct. Errors: SettingError that names the key, what is wrong with it and the nearest known key."""
    known = _known(kind)
    for key in values:
        if key not in known:
            raise SettingError(f"unknown setting {where}{key}{nearest(key, known)}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        what, _, key = str(error).partition(" - at `$.")
        named = f"{where}{key.rstrip('`')}" if key else where or "at the top level"
        raise SettingError(f"setting {named}: {what}") from None


@functools.cache
def _known(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dictionaries. Errors: SettingError that names the file and the line."""
    try:
        found: dict[str, Any] = msgspec.toml.decode(path.read_bytes())
        return found
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}") from None


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """`a.b=c` as (["a", "b"], c), with c read as a TOML value where it is one and as a string otherwise."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise SettingError(f"--set takes section.key=value, not {text!r}")
    try:
        parsed = msgspec.toml.decode(f"value = {value}")["value"]
    except msgspec.DecodeError:
        parsed = value
    return path.split("."), parsed


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries, the second over the first; neither is changed."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def by_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted names ({"round.clients": 5}), by section ({"round": {"clients": 5}}) or both, all by section."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        for key in reversed(name.split(".")):
            value = {key: value}
        found = merge(found, value)
    return found


def load_settings(config: Path | None, assignments: Iterable[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given, as nested dictionaries: the file, then --set, then flags; checked against Settings."""
    overrides: dict[str, Any] = read_toml(config) if config else {}
    for text in assignments:
        path, value = parse_assignment(text)
        for key in reversed(path):
            value = {key: value}
        overrides = merge(overrides, value)
    overrides = merge(overrides, flags)
    convert(Settings, overrides, "")
    return overrides
