"""Typed settings from TOML files and flags. An unknown key, a wrong type or a bad value is an error that names the setting."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from attune.common.errors import SettingError, nearest
from attune.common.text import converted, host_and_port

AUTO = "auto"  # in place of a method's name: the best of several
EVERYDAY, PUBLISHED, PLAIN = PRESETS = "everyday", "published", "plain"
LONGEST_NAME = 80  # characters of a federation's name
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Probability = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Decay = Annotated[float, msgspec.Meta(gt=0, le=1)]
Encoding = Literal["", "bf16", "int8", "zstd"]  # attune.common.exchange.encodings says what each does

S = TypeVar("S", bound=msgspec.Struct)


class TrainSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Local training on a device. The defaults were chosen on validation data: benchmarks/results/settings.csv."""

    # Learning rate of local SGD.
    lr: Positive = 0.03
    # Momentum of local SGD. It starts at zero in each order. 0: plain SGD.
    momentum: Share = 0.9
    # L2 penalty of local SGD. 0: none.
    weight_decay: NonNegative = 0.0
    # Samples in a step. More than the device has: all samples.
    batch_size: Count = 32
    # Passes over the data in an order. Not set, and without `privacy.unit`: 50 steps of the median device, 5 to 25 passes.
    local_epochs: Count = 5
    # Mini-batch steps in an order, instead of epochs. 0: by epochs.
    local_steps: CountOrZero = 0
    # Largest L2 norm of a step's gradient; larger gradients are scaled down. 0: no clipping.
    clip_norm: NonNegative = 1.0
    # bf16: the forward pass in bfloat16 where torch supports it. Weights stay as they are.
    mixed_precision: Literal["off", "bf16"] = "off"
    # Share of the training samples held out to weight models (docs/does-it-help.md). 0: a device keeps the method's own model.
    validation: Share = 0.1

    # The fields below are later than version 1: they are left out of the plan where they are not set.

    # Optimizer of local steps, begun anew in each order. none: sgd, which alone uses `momentum`. adam wants far smaller rates.
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"] | msgspec.UnsetType = msgspec.UNSET
    # Change of the rate within an order: from `lr` to nearly 0 by half a cosine, or linearly. none: constant.
    schedule: Literal["constant", "cosine", "linear"] | msgspec.UnsetType = msgspec.UNSET
    # Factor of the rate from one round to the next: round r trains with lr * lr_decay^(r - 1). none: 1.
    lr_decay: Decay | msgspec.UnsetType = msgspec.UNSET
    # Changes of each batch of training images, in this order: mirror half of them, shift by up to an eighth, noise of
    # deviation 0.05, blank a quarter of the area. none: no change.
    augment: tuple[Literal["flip", "crop", "noise", "erase"], ...] | msgspec.UnsetType = msgspec.UNSET
    # Score the test part before and after local training. false: only in evaluations of all devices. none: true.
    evaluate: bool | msgspec.UnsetType = msgspec.UNSET
    # Rounds after which all devices report how likely held-out samples are under what they would keep. The dial gets a second
    # held-out share. `--method auto` sets this. none: no round.
    score_after: tuple[Count, ...] | msgspec.UnsetType = msgspec.UNSET

    # What verdicts show. auto: dice of pixels; auroc where one of two classes is below 20 % at most devices; else accuracy.
    score: Literal["auto", "accuracy", "auroc", "dice", "iou"] | msgspec.UnsetType = msgspec.UNSET
    # Loss with a label for every pixel. dice: cross-entropy plus 1 minus the soft Dice of each image. none: cross-entropy.
    loss: Literal["cross-entropy", "dice"] | msgspec.UnsetType = msgspec.UNSET

    @property
    def scored_rounds(self) -> tuple[int, ...]:
        """The rounds after which devices report a score of what they would keep."""
        return () if self.score_after is msgspec.UNSET else self.score_after

    def in_round(self, number: int) -> TrainSettings:
        """Return the settings with the learning rate of this round; the first round is 1."""
        if self.lr_decay is msgspec.UNSET or number < 2:
            return self
        return msgspec.structs.replace(self, lr=self.lr * self.lr_decay ** (number - 1))


class PrivacySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Differential privacy and secure aggregation of a run: docs/privacy.md.

    A device's owner sets limits of his own (`fedclient --max-epsilon`).
    """

    # Whom the guarantee protects: nobody (none), each sample of a device (example), each group of samples, such as one
    # patient's rows (group), or each device (client: the server adds noise).
    unit: Literal["none", "example", "group", "client"] = "none"
    # Budget over the whole run, of each device or (client) of the run. none: not limited, if `privacy.noise` is set.
    epsilon: Positive | None = None
    # Chance that the guarantee fails. Set it well below 1 / (samples of a device), or (client) 1 / (devices).
    delta: Probability = 1e-5
    # Largest L2 norm of the gradient of one sample, or of one group's samples together; `train.clip_norm` is not used. client:
    # of one device's change of the shared part.
    clip: Positive = 1.0
    # client: share of the changes that fit into the clipping norm. Noisy counts adapt the norm to it in each round, from
    # `privacy.clip` on (Andrew et al. 2021). none: the norm stays.
    clip_quantile: Probability | None = None
    # Noise multiplier: deviation of the noise in units of `privacy.clip`. none: the smallest that keeps to `privacy.epsilon`.
    noise: NonNegative | None = None
    # example, group: epsilon of noisy `fedserver statistics`, a part of `privacy.epsilon`. none: no statistics.
    statistics_epsilon: Positive | None = None
    # Most training orders that a device carries out. Its noise is set for so many. 0: as many as `round.rounds`.
    orders: CountOrZero = 0
    # client: public number of devices. A round draws each with the chance `round.clients` / `privacy.devices`, or all.
    devices: CountOrZero = 0
    # Public range [lowest, highest] of each feature or channel, or one for all. Features are scaled by it alone.
    ranges: list[tuple[float, float]] = []
    # Public range of each number to predict, or one for all (regression). Empty: the numbers stay as they are.
    target_ranges: list[tuple[float, float]] = []
    # Seed of the noise, for simulations alone: who knows it can take the noise off. none: a secret of each device.
    insecure_seed: int | None = None
    # Secure aggregation: the server learns the sum of a round's updates, and no single one. For methods whose shared parts
    # are means. Bounds on single updates and `round.take_back` are off with it.
    secure_aggregation: bool = False
    # Largest change of a number, in one round, that counts. The sum is exact to 1e-5 of it.
    secure_clip: Positive = 1.0
    # Fewest devices in a sum. Devices refuse smaller sums themselves.
    secure_devices: Annotated[int, msgspec.Meta(ge=3, le=256)] = 5
    # Devices in a sum beyond the threshold. 1: although one fewer than the threshold collude, two others are in it.
    secure_spare: Annotated[int, msgspec.Meta(ge=1, le=127)] = 1
    # All sums are over the devices of the first one, and a missing one means no sum (docs/privacy.md#the-same-cohort).
    same_cohort: bool = False
    # Fewest training samples of a device in a sum. A device with fewer takes no part. 0: any number.
    secure_samples: CountOrZero = 0
    # Largest L2 norm of a device's change of a part; the device reduces a larger one. 0: no bound.
    secure_norm: NonNegative = 0.0
    # Longest wait, in seconds, for the answers of one exchange. Devices that miss it have dropped out of the round.
    secure_wait_s: Positive = 60.0

    def __post_init__(self) -> None:
        for low, high in (*self.ranges, *self.target_ranges):
            if not -math.inf < low < high < math.inf:
                raise ValueError(f"the range [{low:g}, {high:g}] is none: the lowest number comes first")

    @property
    def on_devices(self) -> bool:
        """True if devices train with noise."""
        return self.unit in ("example", "group")

    @property
    def on_server(self) -> bool:
        """True if the server adds noise to what devices share."""
        return self.unit == "client"


Days = Annotated[float, msgspec.Meta(ge=0.0007)]  # a minute


TAG = "[A-Za-z0-9][A-Za-z0-9._-]{0,31}"  # of devices


class RoundSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Participation in a round, its closing, its encodings and its evaluations."""

    # Number of rounds. After the last one the federation is done. auto: at most 200, with `patience` 10.
    rounds: Count = 40
    # Digest of a model that all devices evaluate once, without a round of training. `fedserver evaluate` sets it.
    given: str | None = None
    # Evaluates the networks that devices share, in place of one given model. `fedserver evaluate --matrix` sets it.
    matrix: bool = False
    # auto: a closed form joins every blend where devices disclose sums (docs/methods/analytic.md#in-every-blend). off: none.
    analytic: Literal["auto", "off"] = "auto"
    # Rounds without a gain in the likelihood of held-out samples, known every fifth round, that end the federation. 0: never.
    patience: CountOrZero = 0
    # buffered: each `round.buffer` updates make a state, and nobody waits (docs/operations/rounds.md#buffered-rounds).
    mode: Literal["synchronous", "buffered"] = "synchronous"
    # Updates that make the next state, if rounds are buffered.
    buffer: Count = 10
    # Exponent a of the weight (1 + s)^-a of an update, if rounds are buffered. s, its staleness, counts the newer states.
    staleness: NonNegative = 0.5
    # Largest staleness of an update that counts, if rounds are buffered. 0: no limit.
    max_staleness: CountOrZero = 20
    # Devices sampled for a round (buffered: that train at the same time). 0, or more than are connected: all of them.
    clients: CountOrZero = 0
    # Devices that must be connected before the plan is made and before each round starts.
    min_clients: Count = 2
    # Updates that a round needs to close. 0: as many as `min_clients`. Never more than the sampled devices.
    quorum: CountOrZero = 0
    # Seconds after which a round closes if it has its quorum. Without a quorum the deadline starts again.
    deadline_s: Positive = 600.0
    # With two thirds of its answers, a round waits for the rest at most this many times as long as devices needed lately, and
    # at least `grace_s` (docs/security.md). 0: until `deadline_s`.
    deadline_multiple: NonNegative = 5.0
    # Seconds after which a round that has its quorum stops waiting for a disconnected device.
    grace_s: Positive = 30.0
    # Seconds without progress in training after which a round with its quorum stops waiting for a device; 0: never. Set it
    # above the time of a download, an evaluation or an upload.
    stall_s: NonNegative = 300.0
    # Seconds after which a sampled, disconnected device is replaced. 0: as `grace_s`. Below 0: never, for the same bits.
    replace_after_s: float = 0.0
    # Share of the connected devices that may be hostile. No round opens whose cohort so many could outvote. 0: it opens, with
    # a warning (docs/security.md#which-cohort-outvotes-whom).
    attackers: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.0
    # Share of extra devices to sample. With 0.3 and `clients` = 10, 13 are, and the tenth update closes the round.
    over_selection: NonNegative = 0.0
    # The state goes back if the devices' median loss is this many times an earlier one's, or if most of them fail. 0: never.
    take_back: NonNegative = 10.0
    # Earlier states that are kept on the disk for `take_back`. May change at a restart.
    keep_states: Count = 3
    # Devices without which a run under `privacy.same_cohort` goes on. May change at a restart.
    left_out: tuple[str, ...] = ()
    # all: every connected device trains, and only the sampled ones exchange weights (FedMCSA's paper).
    train: Literal["sampled", "all"] = "sampled"
    # Encoding of updates: bf16 (half the bytes), int8 (a quarter) or zstd (without loss, extra `zstd` on both sides; also for
    # what is served). Empty: none (docs/protocol.md#encodings).
    encoding: Encoding = ""
    # Encodings of single parts (`shared`, `attended`, `generated`), in the place of `round.encoding`.
    encodings: dict[str, Encoding] = {}
    # Encoding of what devices are served. Empty: as `round.encoding` says. zstd: compressed without loss, as the change from
    # what the device holds. Needs the extra `zstd` on both sides.
    served: Literal["", "zstd"] = ""
    # tag:NAME: only devices with this tag train; the others evaluate. Empty: all.
    devices: Annotated[str, msgspec.Meta(pattern=f"^(tag:{TAG})?$")] = ""
    # Interval, in rounds, at which all devices also evaluate the new state. 0: only at the end.
    evaluate_every: CountOrZero = 0
    # Do these evaluations only in this number of last rounds (FedTP: 5 and 200 of 1500 rounds). 0: in all rounds.
    evaluate_last: CountOrZero = 0
    # All devices also evaluate after each of this number of last rounds. 2: the last evaluation begins from what all devices
    # found in the one before (docs/does-it-help.md#the-blend).
    evaluate_each_last: CountOrZero = 2
    # Rounds for newcomers to a finished federation (docs/operations/rounds.md#newcomers). 0: none. May change at a restart.
    adapt_rounds: CountOrZero = 0
    # Parts that newcomers train: what the method stores for each device, their embedding, embedding and hypernetwork, or
    # everything. May change at a restart.
    adapt: Literal["personal", "embedding", "hypernetwork", "all"] = "personal"


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the server, and timeouts for silent peers."""

    # Largest blob that a device may upload. The size that the model needs is always a limit too.
    max_blob_bytes: Count = 8 << 30
    # Largest model that the devices' data may ask for. It is checked before the model is built.
    max_model_bytes: Count = 4 << 30
    # Largest L2 norm of an update's change from what was served, for each part. 0: no limit.
    max_update_norm: NonNegative = 0.0
    # Blobs of up to this size in all travel within an order or an update, without a transfer of their own. 0: none.
    inline_bytes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 1 << 16
    # Disk for copies of blobs whose state is in S3 (--blobs). The least recently used copies go first.
    cache_bytes: Count = 8 << 30
    # Pace of beats: a silent side sends one every half of this. A side that is silent for twice this is gone, during a
    # transfer for 15 times this. Beside more than 200 devices it is slower, up to 60 s.
    keepalive_s: Positive = 2.0
    # A connection that has made no call for this time is closed.
    handshake_s: Positive = 10.0
    # A step of a round without headway for this time is named in log and status, and health is NOT_SERVING. 0: never.
    watchdog_s: NonNegative = 300.0
    # Life of a device's certificate; a minute is 0.0007. The device renews it after two thirds of this time.
    certificate_days: Days = 90.0
    # CPU threads for tensors. 0: one fewer than the machine has cores, so that one is free for the network.
    threads: CountOrZero = 0
    # Processor for the hypernetwork and for mixing: auto (an NVIDIA GPU, if there is one), cpu, cuda or cuda:N.
    # Another processor rounds differently. In a simulation auto is the `device` of its devices.
    device: str = "auto"
    # Name of this federation for people, in the title of the dashboard: up to 80 characters.
    name: str = ""
    # HOST or HOST:PORT under which devices reach this server, for join lines. Empty: the machine's name.
    advertise: str = ""
    # File for the token that only reads /metrics, where the monitor can read it. Empty: metrics-token in the home.
    metrics_token_file: str = ""
    # Permissions of this file: 0600, 0640, 0604 or 0644.
    metrics_token_mode: str = "0640"  # noqa: S105 - no password

    def __post_init__(self) -> None:
        host_and_port(self.advertise or "localhost")
        if len(self.name) > LONGEST_NAME or not self.name.isprintable():
            raise SettingError(f"setting server.name takes up to {LONGEST_NAME} printable characters, not {self.name[:100]!r}")
        if not re.fullmatch("06[04][04]", self.metrics_token_mode):
            raise SettingError(
                f"setting server.metrics_token_mode takes 0600, 0640, 0604 or 0644, not {self.metrics_token_mode!r}"
            )


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole federation.toml."""

    # Seed of every random draw: first weights, sampled devices, batches, dropout. The same seed, devices and shards give the
    # same bits on the same processor.
    seed: int = 0
    # The section [data].
    data: dict[str, Any] = {}
    # The section [method].
    method: dict[str, Any] = {}
    # The section [model].
    model: dict[str, Any] = {}
    # The section [train].
    train: dict[str, Any] = {}
    # The section [round].
    round: dict[str, Any] = {}
    # The section [server].
    server: dict[str, Any] = {}
    # The section [privacy].
    privacy: dict[str, Any] = {}
    # The section [auto].
    auto: dict[str, Any] = {}
    # The sections [transforms.NAME]: transforms on updates, each with its settings.
    transforms: dict[str, dict[str, Any]] = {}


def convert(kind: type[S], values: Mapping[str, Any], where: str) -> S:
    """Convert `values` to a typed struct. `where`: the prefix of the keys in errors, such as "round.".

    Raises:
        SettingError: A key is unknown or its value is wrong; the error names it, and the nearest known key.
    """
    known = keys_of(kind)
    for key in values:
        if key not in known:
            raise SettingError(f"unknown setting {where}{key}{nearest(key, known)}")
    try:
        return converted(dict(values), kind)
    except msgspec.ValidationError as error:
        what, _, key = str(error).replace("array`, got `str`", "array`, got `str`; a list is ['a', 'b']").partition(" - at `$.")
        named = f"{where}{key.rstrip('`')}" if key else where or "at the top level"
        raise SettingError(f"setting {named}: {what}") from None


@functools.cache
def keys_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names that settings of this kind have in a file."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested dictionaries.

    Raises:
        SettingError: The file cannot be read or is not TOML; the error names the file and the line.
    """
    try:
        return dict(msgspec.toml.decode(path.read_bytes()))
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}") from None


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """Parse `a.b=c` to (["a", "b"], c); c is read as a TOML value if it is one, else as text."""
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise SettingError(f"--set takes section.key=value, not {text!r}")
    try:
        parsed = msgspec.toml.decode(f"value = {value}")["value"]
    except msgspec.DecodeError:
        parsed = value
    return path.split("."), parsed


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested dictionaries into a new one; values of `over` win."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def by_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by section: {"round.clients": 5} and {"round": {"clients": 5}} both become the latter."""
    sections: dict[str, Any] = {}
    for name, value in settings.items():
        for key in reversed(name.split(".")):
            value = {key: value}
        sections = merge(sections, value)
    return sections


def load_settings(config: Path | None, assignments: Iterable[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the settings of a file, then those of --set, then those of flags, and check them against `Settings`."""
    overrides: dict[str, Any] = read_toml(config) if config else {}
    for text in assignments:
        path, value = parse_assignment(text)
        overrides = merge(overrides, by_section({".".join(path): value}))
    return checked(merge(overrides, flags))


def checked(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings that a user gives, if their sections are known.

    Raises:
        SettingError: A section is unknown.
    """
    convert(Settings, given, "")
    return given
