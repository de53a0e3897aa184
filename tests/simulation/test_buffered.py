"""Buffered rounds (FedBuff) of whole federations, on a simulated clock: against float64, repeated, and stopped in between."""

import math
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, relu

import attune
from attune.common import faults
from attune.common.config import by_section
from attune.common.errors import SettingError
from attune.common.models.registry import build
from attune.common.models.structure import components
from attune.common.plan import Plan
from attune.common.seeds import derive
from attune.common.wire.files import TensorFile
from attune.fedserver.core.planning import resolve
from attune.fedserver.core.records import Arrival
from attune.fedserver.lab.aggregators.stored import names_in
from attune.fedserver.lab.engine import Engine
from attune.fedserver.ports.blobs import blob_of
from attune.fedserver.view.homes import render_status
from attune.simulation.memory import MemoryBlobs
from attune.simulation.result import SimulationResult
from attune.simulation.simulated_clock import SimulatedClock
from tests.forked import STEADY, Forked


class Interrupted(Exception):
    pass


Values = dict[str, torch.Tensor]
PLAIN = {
    "round.mode": "buffered", "round.buffer": 2, "round.evaluate_each_last": 0, "train.local_epochs": 1,
    "train.local_steps": 0, "train.batch_size": 8,
}  # fmt: skip
UNBOUNDED = {"method.bound_change": 0.0, "method.bound_samples": 0.0, "round.take_back": 0.0}
VIT = {"model.width": 8, "model.heads": 2, "model.depth": 1, "model.patch": 4}
SPEEDS = {"site-0": 1.0, "site-1": 1.4, "site-2": 3.1, "site-3": 7.3}
# By hand for these speeds and buffers of 2: (device, the version that its training began from), round by round.
SCRIPT = [
    [("site-0", 0), ("site-1", 0)],  # at 1.4
    [("site-0", 1), ("site-1", 1)],  # at 2.8
    [("site-2", 0), ("site-0", 2)],  # at 3.8
    [("site-1", 2), ("site-0", 3)],  # at 4.8
    [("site-0", 4), ("site-1", 4)],  # at 6.2
    [("site-2", 3), ("site-0", 5)],  # at 7.2
    [("site-3", 0), ("site-1", 5)],  # at 7.6
]


def noise(name: str, number: int, parameter: str, like: torch.Tensor) -> torch.Tensor:
    """Return what a device adds to a parameter in its order of a round, instead of training."""
    draw = torch.Generator().manual_seed(derive(5, name, number, parameter))
    return 0.05 * torch.randn(like.shape, generator=draw, dtype=torch.float64)


def add_noise(model: torch.nn.Module, data: Any, context: Any) -> float:
    """Train: add the same numbers whatever the data are."""
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            value.add_(noise(context.name, context.round, parameter, value).to(value.dtype))
    return 1.0


def scripted(shards: Mapping[str, Path], method: str, **settings: Any) -> SimulationResult:
    given = PLAIN | UNBOUNDED | {f"method.{name}": value for name, value in settings.items()}
    given |= VIT if method == "fedtp" else {}
    clock = SimulatedClock(SPEEDS)
    result = attune.simulate(
        shards, method, rounds=len(SCRIPT), seed=3, settings=given, clock=clock, train=add_noise, progress=False
    )
    assert result.arrivals == logged()
    assert list(clock.closed.values()) == pytest.approx([1.4, 2.8, 3.8, 4.8, 6.2, 7.2, 7.6])
    return result


def logged() -> list[Arrival]:
    """Return the script as a log of arrivals."""
    return [Arrival(name, version + 1, number) for number, closed in enumerate(SCRIPT, 1) for name, version in closed]


def start_of(result: SimulationResult) -> dict[tuple[str, str], Values]:
    """Return the server's first state, by part and key, in float64."""
    blobs = MemoryBlobs()
    engine = Engine(plan_of(result), [], blobs, 0)
    return {(slot.part, slot.key): wide(TensorFile(blobs.open(blob_of(slot)))) for slot in engine.staged_slots()}


def end_of(result: SimulationResult) -> dict[tuple[str, str], Values]:
    """Return the server's last state."""
    blobs = result._state.storage.blobs
    return {(slot.part, slot.key): wide(TensorFile(blobs.open(blob_of(slot)))) for slot in result._outcome.snapshot.slots}


def plan_of(result: SimulationResult) -> Plan:
    plan = result._outcome.snapshot.plan
    assert plan is not None
    return plan


def wide(tensors: Mapping[str, torch.Tensor]) -> Values:
    return {name: tensors[name].double() if tensors[name].is_floating_point() else tensors[name] for name in tensors}


def samples_of(result: SimulationResult) -> dict[str, float]:
    return {row.client: float(row.samples or 0) for row in result._outcome.snapshot.rows if row.work == "train"}


def fresh(closing: int, version: int) -> float:
    """Return FedBuff's weight: 1 / sqrt(1 + s), of an update that is aggregated in this round, from 0."""
    return 1 / (1 + closing - version) ** 0.5


def close(actual: Values, expected: Values) -> bool:
    return all(torch.allclose(actual[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


def averaged(x: Values, samples: Mapping[str, float]) -> Values:
    """Return a shared value after the script: x <- x + sum_i m_i / M (1 + s_i)^-1/2 Delta_i."""
    for number, closed in enumerate(SCRIPT):
        total = sum(samples[name] for name, _ in closed)
        x = {
            key: value
            + sum(samples[name] / total * fresh(number, since) * noise(name, since + 1, key, value) for name, since in closed)
            for key, value in x.items()
        }
    return x


def test_shared_parts_agree_with_an_independent_calculation(clouds: dict[str, Path]) -> None:
    result = scripted(clouds, "fedavg")
    begin, end = start_of(result)["shared", "value"], end_of(result)["shared", "value"]
    expected = averaged(begin, samples_of(result))
    assert close(end, expected) and not close(end, begin)


def test_attended_parts_agree_with_an_independent_calculation(clouds: dict[str, Path]) -> None:
    """x_i is the device's own last value. Others see it with the weight of its staleness; what it loses goes to their own."""
    sigma = 4.0
    result = scripted(clouds, "fedmcsa", sigma=sigma)
    plan, begin, end = plan_of(result), start_of(result), end_of(result)
    units = components(build(plan.model, plan.seed))
    mean, own = begin["attended", "cold-start"], dict[str, Values]()
    served = [dict.fromkeys(SPEEDS, mean)]  # by version: what each device is served
    for number, closed in enumerate(SCRIPT):
        handed_in = {
            name: {key: value + noise(name, since + 1, key, value) for key, value in served[since][name].items()}
            for name, since in sorted(closed)
        }
        weights = {name: fresh(number, since) for name, since in closed}
        mixed: dict[str, Values] = {name: {} for name in handed_in}
        for keys in units.values():
            rows = {name: torch.cat([x[key].reshape(-1) for key in keys]) for name, x in handed_in.items()}
            for me in rows:
                logits = {k: sigma * float(rows[me] @ rows[k] / rows[me].norm() / rows[k].norm()) for k in rows}
                total = sum(math.exp(logit) for logit in logits.values())
                others = {k: math.exp(logits[k]) / total * weights[k] for k in rows if k != me}
                attention = others | {me: 1 - sum(others.values())}
                for key in keys:
                    mixed[me][key] = sum((a * handed_in[k][key] for k, a in attention.items()), torch.zeros(()))
        known = len(own | mixed)
        mean = {
            key: value + sum(mixed[name][key] - served[-1][name][key] for name in mixed) / known for key, value in mean.items()
        }
        own |= mixed
        served.append({name: own.get(name, mean) for name in SPEEDS})
    assert close(end["attended", "cold-start"], mean)
    for name in SPEEDS:
        assert close(end["attended", f"client/{name}"], own[name])


def test_generated_parts_agree_with_an_independent_calculation(digits: dict[str, Path]) -> None:
    """Phi and z take one step along sum_i m_i / M (1 + s_i)^-1/2 <W_i, Delta_i>, W_i of the present phi (FedTP eq. 7-10)."""
    lr = 0.5
    plain = {"server_optimiser": "sgd", "server_momentum": 0.0, "server_weight_decay": 0.0, "server_lr": lr}
    shards = {f"site-{n}": path for n, path in enumerate(digits.values())}
    result = scripted(shards, "fedtp", **plain, embedding_dim=4, hidden=9)
    begin, end, samples = start_of(result), end_of(result), samples_of(result)
    assert close(end["shared", "value"], averaged(begin["shared", "value"], samples))
    initial = begin["generated", "initial"]
    phi = {name: value for name, value in begin["generated", "network"].items() if name.startswith(("mlp.", "head."))}
    [head] = {name.removesuffix(".bias") for name in phi if name.startswith("head.") and name.endswith(".bias")}
    z = {name: torch.randn(4, generator=embedding_draw(name), dtype=torch.float64).float().double() for name in SPEEDS}
    for number, closed in enumerate(SCRIPT):
        moving = {key: value.clone().requires_grad_() for key, value in phi.items()}
        drawn = {name: z[name].clone().requires_grad_() for name, _ in closed}
        total, loss = sum(samples[name] for name, _ in closed), torch.zeros((), dtype=torch.float64)
        for name, since in closed:
            hidden = linear(drawn[name], moving["mlp.0.weight"], moving["mlp.0.bias"])
            for k in (1, 2, 3):
                hidden = linear(relu(hidden), moving[f"mlp.{k}.weight"], moving[f"mlp.{k}.bias"])
            generated = linear(hidden, moving[f"{head}.weight"], moving[f"{head}.bias"])
            change = torch.cat([noise(name, since + 1, key, value).reshape(-1) for key, value in initial.items()])
            loss = loss - samples[name] / total * fresh(number, since) * generated @ change
        loss.backward()
        phi = {key: value.detach() - lr * value.grad for key, value in moving.items()}
        z |= {name: value.detach() - lr * value.grad for name, value in drawn.items()}
    assert close(end["generated", "network"], phi)
    names = names_in(end["generated", "network"]["embedding.clients"].numpy())
    assert close(dict(zip(names, end["generated", "network"]["embedding.value"], strict=True)), z)


def embedding_draw(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive(3, "embedding", name))


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "fedper"])
def test_the_order_of_arrivals_repeats_a_run(method: str, clouds: dict[str, Path], tmp_path: Path) -> None:
    settings = PLAIN | {"round.evaluate_every": 2}
    first = attune.simulate(clouds, method, rounds=6, seed=3, settings=settings, clock=SimulatedClock(SPEEDS), progress=False)

    def again(home: Path | None, until: int = 10**9) -> SimulationResult:
        orders = 0

        def count(share: float) -> None:
            nonlocal orders
            orders += 1
            if orders > until:
                raise Interrupted

        clock = SimulatedClock(arrivals=first.arrivals)
        return attune.simulate(clouds, method, rounds=6, seed=3, settings=settings, clock=clock, home=home, progress=count)

    for until in (1, 4, 3):
        with pytest.raises(Interrupted):
            again(tmp_path / "home", until)
    repeated = again(tmp_path / "home")
    assert repeated.digests == first.digests == again(None).digests
    assert repeated.arrivals == first.arrivals
    other = attune.simulate(clouds, method, rounds=6, seed=3, settings=settings, progress=False)
    assert other.arrivals != first.arrivals and other.digests != first.digests


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {"round.buffer": 4, "round.quorum": 2, "round.deadline_s": 3.0}),
        ("fedavg", {"round.max_staleness": 2}),
        ("fedmcsa", {"round.clients": 3, "round.max_staleness": 3}),
    ],
)
def test_short_buffers_and_discarded_updates_are_repeated(
    method: str, settings: dict[str, Any], clouds: dict[str, Path]
) -> None:
    """Use speeds at which site-3 is withdrawn, or its update is too old, and some buffers close at the deadline."""

    def run(clock: SimulatedClock) -> SimulationResult:
        return attune.simulate(clouds, method, rounds=7, seed=3, settings=PLAIN | settings, clock=clock, progress=False)

    first = run(SimulatedClock(SPEEDS))
    sizes = Counter(arrival.round for arrival in first.arrivals)
    assert (min(sizes.values()) < settings.get("round.buffer", 2)) == ("round.deadline_s" in settings)
    assert ("site-3", 1) not in {arrival[:2] for arrival in first.arrivals}
    again = run(SimulatedClock(arrivals=first.arrivals))
    assert again.digests == first.digests and again.arrivals == first.arrivals


@pytest.mark.parametrize("method", ["fedavg", "fedtp"])
def test_a_device_that_joins_later_is_repeated(method: str, digits: dict[str, Path], tmp_path: Path) -> None:
    """A founder's embedding is drawn; that of a later device begins as the mean of the trained ones (FedTP)."""
    shards = {f"site-{n}": path for n, path in enumerate(digits.values())}
    settings = PLAIN | (VIT | {"method.embedding_dim": 4, "method.hidden": 9} if method == "fedtp" else {})

    def run(founder: bool, rounds: int = 3, home: Path | None = None) -> SimulationResult:
        log = [("site-0", 1, 1), ("site-1", 1, 1), ("site-0", 2, 2), ("site-3", 2, 3, founder), ("site-1", 2, 3)]
        clock = SimulatedClock(arrivals=[Arrival(*each) for each in log])
        result = attune.simulate(
            shards, method, rounds=rounds, seed=3, settings=settings, clock=clock, home=home, progress=False
        )
        assert [tuple(each) for each in result.arrivals] == [(*each, True)[:4] for each in log]
        return result

    late = run(founder=False)
    assert run(founder=False, home=tmp_path / "home").digests == late.digests
    assert (run(founder=True).digests == late.digests) == (method == "fedavg")


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ([("site-0", 1, 1), ("site-1", 1, 1), ("site-2", 3, 2)], "site-2 answers in round 2 an order of round 3"),
        ([("site-0", 1, 1), ("site-0", 1, 2)], "site-0 answers in round 2 an order of round 1, and had counted in round 1"),
        ([("site-0", 1, 1), ("site-1", 1, 3)], "no update counted in round 2"),
        ([("site-0", 1, 1)], "it has 1 round, and round.rounds is 2"),
        ([("site-0", 1, 1), ("elsewhere", 1, 2)], "it names elsewhere, which has no shard"),
    ],
)
def test_a_log_that_cannot_be_followed_is_an_error(log: list[Any], why: str, clouds: dict[str, Path]) -> None:
    clock = SimulatedClock(arrivals=[Arrival(*each) for each in log])
    with pytest.raises(SettingError, match=f"this order of arrivals cannot be repeated: {re.escape(why)}"):
        attune.simulate(clouds, "fedavg", rounds=2, seed=3, settings=PLAIN, clock=clock, progress=False)


def test_synchronous_rounds_have_no_order_of_arrivals(clouds: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match=r'set round\.mode = "buffered", as in the run'):
        clock = SimulatedClock(arrivals=[Arrival("site-0", 1, 1)])
        attune.simulate(clouds, "fedavg", rounds=1, seed=3, clock=clock, progress=False)


def test_without_staleness_rounds_are_synchronous_ones(clouds: dict[str, Path]) -> None:
    """Equal speeds and a buffer for all devices: no update is stale, and shared values differ by rounding alone."""
    plain = {name: value for name, value in PLAIN.items() if name not in ("round.mode", "round.buffer")}
    for method, key in (("fedavg", ("shared", "value")), ("fedmcsa", ("attended", "cold-start"))):
        buffered = attune.simulate(clouds, method, rounds=3, seed=3, settings=PLAIN | {"round.buffer": 4}, progress=False)
        synchronous = attune.simulate(clouds, method, rounds=3, seed=3, settings=plain, progress=False)
        assert close(end_of(buffered)[key], end_of(synchronous)[key])


@pytest.mark.parametrize(
    ("method", "settings", "why"),
    [
        ("fedavg", {"privacy.secure_aggregation": True}, "privacy.secure_aggregation"),
        ("fedavg", {"privacy.unit": "client", "privacy.noise": 1.0, "privacy.devices": 4}, 'privacy.unit = "client"'),
        ("fedavg", {"round.train": "all"}, 'round.train = "all"'),
        ("fedavg", {"round.clients": 2, "round.over_selection": 0.5}, "round.over_selection"),
        ("fedavg", {"method.robust": "multi-krum"}, "method.robust = 'multi-krum' and round.buffer = 2"),
        ("fedmcsa", {"round.encoding": "int8"}, "encoding of attended parts"),
        ("fedtp", {"method.embedding": "device"}, 'method.embedding = "device"'),
    ],
)
def test_what_excludes_buffered_rounds_is_named_before_the_start(method: str, settings: dict[str, Any], why: str) -> None:
    overrides = by_section({"method.name": method, **PLAIN, **settings})
    with pytest.raises(SettingError, match=f'round.mode = "buffered" cannot be combined with .*{re.escape(why)}'):
        resolve(overrides)


def test_devices_on_a_clock_work_one_by_one(clouds: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match="leave the executor out"):
        attune.simulate(clouds, "fedavg", rounds=1, settings=PLAIN, executor="stacked", progress=False)


def test_synchronous_rounds_on_the_clock(clouds: dict[str, Path]) -> None:
    plain = {name: value for name, value in PLAIN.items() if name not in ("round.mode", "round.buffer")}
    for sampled, seconds in (({}, 7.3), ({"round.clients": 2, "round.over_selection": 1.0}, 1.4)):
        clock = SimulatedClock(SPEEDS)
        attune.simulate(clouds, "fedavg", rounds=2, seed=3, settings=plain | sampled, clock=clock, progress=False)
        assert list(clock.closed.values()) == pytest.approx([seconds, 2 * seconds])


@pytest.mark.parametrize("robust", ["none", "clip", "median", "trimmed-mean", "multi-krum"])
def test_bounds_and_robust_rules_hold_in_a_buffer(robust: str, clouds: dict[str, Path]) -> None:
    """One device of five hands in huge changes in every round; the others' noise stays the measure."""

    def hostile(model: torch.nn.Module, data: Any, context: Any) -> float:
        add_noise(model, data, context)
        if context.name == "site-4":
            with torch.no_grad():
                for value in model.parameters():
                    value.add_(1e3)
        return 1.0

    shards = clouds | {"site-4": clouds["site-0"]}
    settings = PLAIN | {"round.buffer": 5, "method.robust": robust, "round.take_back": 0.0}
    result = attune.simulate(shards, "fedavg", rounds=4, seed=3, settings=settings, train=hostile, progress=False)
    begin, end = start_of(result)["shared", "value"], end_of(result)["shared", "value"]
    assert max(float((end[name] - begin[name]).abs().max()) for name in begin) < 1.0


def to_be_killed() -> None:
    """Run in the process that the test below kills."""
    [home, shards] = map(Path, sys.argv[:2])
    repeated({path.name: path for path in sorted(shards.iterdir())}, home)


def repeated(shards: Mapping[str, Path], home: Path | None) -> SimulationResult:
    """Repeat the script with real training, in this order of arrivals."""
    clock = SimulatedClock(arrivals=logged())
    return attune.simulate(
        shards, "fedmcsa", "dnn", rounds=len(SCRIPT), seed=3, settings=PLAIN, clock=clock, home=home, progress=False
    )


def test_the_same_order_of_arrivals_gives_the_same_bits_after_kill_9(clouds: dict[str, Path], tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    for name, path in clouds.items():
        shutil.copytree(path, shards / name)
    whole = repeated(clouds, None)
    for fault in (
        "server:1:update-accepted=kill",  # durable in the inbox, and not in the record
        "server:3:aggregated=kill",
        "server:4:committed=kill",
        "server:5:record-written=kill",
        "site-3:1:order-committed=kill",
    ):
        environment = os.environ | STEADY | {faults.VARIABLE: fault}
        with (tmp_path / "log").open("ab") as log:
            process = Forked([str(tmp_path / "home"), str(shards)], log, log, environment, f"{__name__}:to_be_killed")
        assert process.wait(60) == -signal.SIGKILL, (fault, (tmp_path / "log").read_text())
    assert repeated(clouds, tmp_path / "home").digests == whole.digests


def test_a_device_that_is_too_slow_is_told_so(clouds: dict[str, Path]) -> None:
    settings = PLAIN | {"round.max_staleness": 2}
    clock = SimulatedClock(SPEEDS)
    result = attune.simulate(clouds, "fedavg", rounds=7, seed=3, settings=settings, clock=clock, progress=False)
    assert result.status["buffer"]["discarded"] == 1 and ("site-3", 1) not in {arrival[:2] for arrival in result.arrivals}
    notes = {client["name"]: client["note"] for client in result.status["clients"]}
    assert "is 6 states old and does not count: at most 2 are allowed (round.max_staleness)" in notes["site-3"]


def test_status_shows_mode_fill_and_staleness(clouds: dict[str, Path]) -> None:
    result = attune.simulate(clouds, "fedavg", rounds=3, seed=3, settings=PLAIN, clock=SimulatedClock(SPEEDS), progress=False)
    buffer = {"size": 2, "filled": 0, "training": 0, "staleness": 1.0, "oldest": None, "discarded": 0}
    assert result.status["buffer"] == buffer, "the third round had updates of staleness 2 and 0"
    shown = render_status(result.status)
    assert "buffered rounds: 0 of 2 updates are in, 0 devices train, mean staleness of the last round 1.0" in shown
