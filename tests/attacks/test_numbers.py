"""Numbers of devices that are finite one by one, and infinite once they are added up: none of them breaks a view."""

import json
import math
import sqlite3
from pathlib import Path

import msgspec
import pytest

import attune
from attune.common.errors import UpdateRefused
from attune.common.metrics import LARGEST, LARGEST_GAIN, METRICS, RIVALS, WIDE, read_metrics
from attune.common.site_statistics import NoisyColumn, NoisyLayout, NoisySums
from attune.features.pictures import plots
from attune.features.web.pages import of_home
from attune.features.web.parts import parts
from attune.features.web.prometheus import exposition
from attune.fedserver.core.fleet_verdict import fleet_verdicts
from attune.fedserver.home import ServerHome
from attune.fedserver.surveys.answers import noisy_fleet
from attune.fedserver.view.export import export_home
from attune.fedserver.view.homes import status_of
from tests.e2e.harness import tabular_shard

NO_LIMIT = {"loss", "seconds", "epsilon"}
NO_LIMIT |= {f"{prefix}{name}_{rival}" for prefix in ("", "kept_") for name in ("gain", "error") for rival in RIVALS}
NO_LIMIT |= {f"likelihood_{model}" for model in (*RIVALS, "personalized", "kept", "closed_form", "closed_form_error")}


def test_every_number_without_a_limit_of_its_own_has_this_one() -> None:
    assert set(WIDE) == NO_LIMIT
    for name in METRICS:
        if name != "kept":
            with pytest.raises(UpdateRefused, match=name):
                read_metrics(json.dumps({name: 2 * LARGEST}).encode(), "eve")


@pytest.mark.parametrize("name", WIDE)
def test_a_number_whose_sum_overflows_is_refused(name: str) -> None:
    for value in (1.7e308, -1.7e308, 1.1 * LARGEST):
        with pytest.raises(UpdateRefused, match=name):
            read_metrics(json.dumps({name: value}).encode(), "eve")
    read = getattr(read_metrics(json.dumps({name: LARGEST}).encode(), "eve"), name)
    assert read == (LARGEST_GAIN if "gain" in name else LARGEST)


@pytest.mark.parametrize("gain", [LARGEST, -LARGEST])
def test_one_device_does_not_hide_the_gains_of_all_others(gain: float) -> None:
    honest = {"test_samples": 20, "kept_better_than_local": 12, "kept_worse_than_local": 8, "kept_gain_local": 0.25}
    honest |= {"kept_error_local": 0.1, "kept_p_local": 0.04}
    reports = {f"site-{n}": read_metrics(json.dumps(honest).encode(), "site", "regression") for n in range(9)}
    reports["eve"] = read_metrics(json.dumps(honest | {"kept_gain_local": gain}).encode(), "eve", "regression")
    [verdict] = fleet_verdicts({name: msgspec.structs.asdict(report) for name, report in reports.items()})
    assert verdict.gain == pytest.approx(0.225 + math.copysign(0.2, gain))


@pytest.mark.parametrize("value", [1.7e308, LARGEST])
def test_all_views_of_a_home_with_such_numbers_can_be_read(tmp_path: Path, value: float) -> None:
    """An earlier version has accepted the first, and this version accepts the second."""
    shards = [tabular_shard(tmp_path / f"site-{n}", seed=n, samples=30) for n in range(3)]
    attune.simulate(shards, "fedmcsa", rounds=2, baseline="local", home=tmp_path / "home", progress=False)
    home = ServerHome(tmp_path / "home" / "server")
    with sqlite3.connect(home.path / "state.sqlite") as db:
        for key, text in db.execute("SELECT rowid, row FROM metrics").fetchall():
            row = json.loads(text) | dict.fromkeys(WIDE, value)
            db.execute("UPDATE metrics SET row = ? WHERE rowid = ?", (json.dumps(row).encode(), key))
    db.close()
    assert "inf" not in json.dumps(status_of(home)).lower()
    export_home(home, tmp_path / "results")
    source = of_home(home)
    facts = source.look()
    json.dumps(msgspec.to_builtins(parts(facts)), allow_nan=False)
    reported = [line for line in exposition(facts).decode().splitlines() if line.startswith("attune_reported")]
    assert reported
    assert not any("Inf" in line or "NaN" in line for line in reported)
    source.close()
    plots.plot_home(home, tmp_path / "pictures", [])


# --- statistics with noise, of which one device of ten, or three, lie

LAYOUT = NoisyLayout("fed", "example", 1.0, 1e-5, None, {"sex": NoisyColumn(values=["f", "m"])}, ["0"])
HONEST = NoisySums(100, 4.0, [40.0, 59.5, 0.5, 30.0])


def fleet(liars: int, lie: NoisySums) -> dict[str, NoisySums]:
    return {f"d{at}": lie if at < liars else HONEST for at in range(10)}


@pytest.mark.parametrize("liars", [1, 3])
@pytest.mark.parametrize("deviation", [1e9, 1e-9, 40.0])
def test_noise_that_is_not_the_fleets_hides_no_figures(liars: int, deviation: float) -> None:
    """With a deviation of 1e9 no count was clear; with a small one the errors that are shown were too small."""
    lie = msgspec.structs.replace(HONEST, deviation=deviation)
    shown = noisy_fleet(LAYOUT, fleet(liars, lie), {}, {})
    alone = noisy_fleet(LAYOUT, {name: HONEST for name in fleet(0, HONEST) if int(name[1:]) >= liars}, {}, {})
    assert shown.without.keys() == {f"d{at}" for at in range(liars)}
    assert "noise" in shown.without["d0"]
    assert msgspec.structs.replace(shown, without={}) == alone


def test_slightly_different_accountants_are_no_liars() -> None:
    other = msgspec.structs.replace(HONEST, deviation=4.01)
    assert noisy_fleet(LAYOUT, fleet(3, other), {}, {}).without == {}


@pytest.mark.parametrize("value", [100.0 + 12.1 * 4.0, -(100.0 + 12.1 * 4.0), 1e6, float("inf"), float("nan")])
def test_a_sum_beyond_the_samples_and_twelve_deviations_is_refused(value: float) -> None:
    HONEST.check(LAYOUT, 100)
    with pytest.raises(UpdateRefused, match="noisy sums"):
        msgspec.structs.replace(HONEST, values=[value, 59.5, 0.5, 30.0]).check(LAYOUT, 100)
