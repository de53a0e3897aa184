"""The file of a site's owner: it means what the options mean, cannot be overridden, and refuses what it does not know."""

import re
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner

from attune.common.errors import AttuneError, LimitExceeded, SettingError, UndeclaredLabels
from attune.common.plan import ModelSpec, Plan, Profile
from attune.fedclient import client
from attune.fedclient.cli import main
from attune.fedclient.cli.root import KEYS
from attune.fedclient.gate import PrivacyLimits
from attune.fedclient.limits import OrderLimits, accept_plan
from attune.fedclient.options import DeviceOptions
from attune.fedclient.resource_limits import ResourceLimits, unmet
from tests.docs.conftest import ROOT

PLAN = Plan("f", 0, ModelSpec("mlr", "tabular", (2,), 2), ["a", "b"], "fedavg", {}, column_names=["age", "dose"], train=None)  # type: ignore[arg-type]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts the command with a site's file, and returns the device's options or the output."""
    made: list[DeviceOptions] = []

    def take_part(self: client.Client, console: Any) -> Path:
        made.append(self.options)
        return tmp_path

    monkeypatch.setattr(client.Client, "take_part", take_part)

    def start(text: str, *more: str) -> DeviceOptions | str:
        (tmp_path / "site.toml").write_text(text, encoding="utf-8")
        given = ["--data", str(tmp_path), "--server", "localhost:1", "--site", str(tmp_path / "site.toml"), *more]
        result = CliRunner().invoke(main, given)
        assert result.exit_code in (0, SettingError.exit_code), result.output
        return result.output if result.exit_code else made.pop()

    return start


def example() -> str:
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    match = re.search(r"```toml\n(# site\.toml\n.*?)```", text, re.DOTALL)
    assert match is not None
    return match[1]


def test_the_example_of_the_documents_is_what_the_options_say(started: Any) -> None:
    options = started(example())
    assert options.privacy == PrivacyLimits(4.0, 1e-5, 50, "none", devices=5)
    assert options.limits == OrderLimits(models=("mlr", "dnn"), runs=("first",))
    assert options.table.columns == ("age", "dose", "pressure") and options.disclose == ()
    assert options.resources.when == ("22:00-06:00", "idle")


def test_every_key_is_an_option_and_stands_in_the_documents() -> None:
    options = {name for parameter in main.params if isinstance(parameter, click.Option) for name in parameter.opts}
    assert {f"--{key}" for key in KEYS} <= options
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    assert [key for key in KEYS if f"`{key}`" not in page and f"{key} = " not in page] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-epsilom = 4.0", "did you mean 'max-epsilon'"),
        ("max_epsilon = 4.0", "did you mean 'max-epsilon'"),
        ("token = 'x'", "unknown key 'token'"),
        ("max-epsilon = true", "max-epsilon is a finite number, not True"),
        ("max-epsilon = nan", "max-epsilon is a finite number, not nan"),
        ("max-epsilon = inf", "max-epsilon is a finite number, not inf"),
        ("max-epsilon = -1.0", "max-epsilon: "),
        ("max-epochs = 1.5", "max-epochs is a whole number, not 1.5"),
        ("max-epochs = [3]", "max-epochs is a whole number"),
        ("disclose = 'statistics'", "disclose is a list of texts"),
        ("disclose = ['everything']", "disclose: 'everything' is not"),
        ("columns = []", "columns is a list with at least one name"),
        ("only-run = []", "only-run is a list with at least one text"),
        ("only-when = ['25:00-06:00']", "not '25:00-06:00' (--only-when)"),
        ("metrics = 'some'", "metrics: "),
        ("max-epsilon 4", "is not valid TOML"),
    ],
)
def test_what_the_file_cannot_mean_is_refused_by_name(started: Any, text: str, said: str) -> None:
    output = started(text)
    assert isinstance(output, str) and said in output and "Traceback" not in output


def test_the_command_line_does_not_change_what_the_file_decides(started: Any) -> None:
    assert "decides max-epsilon: leave --max-epsilon out" in started("max-epsilon = 4.0", "--max-epsilon", "100")
    assert "decides disclose" in started("disclose = []", "--disclose", "statistics")
    assert started("max-epsilon = 4.0", "--max-delta", "1e-6").privacy == PrivacyLimits(4.0, 1e-6)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--data", "x", "--server", "localhost:1", "--site", str(tmp_path / "none.toml")])
    assert result.exit_code == SettingError.exit_code and "cannot read" in result.output


def test_a_plan_beyond_the_owners_lists_ends_with_the_limit_and_names_the_key() -> None:
    for limits, key in ((OrderLimits(runs=("second",)), "only-run"), (OrderLimits(models=("dnn",)), "only-model")):
        with pytest.raises(LimitExceeded, match=f"--{key}"):
            limits.check_plan(PLAN, 40)

    class NoStore:
        def kept(self, what: str) -> None: ...

    from attune.fedclient.address import ServerAddress
    from attune.fedclient.read_options import ReadOptions

    def options(columns: str) -> DeviceOptions:
        return DeviceOptions(Path(), ServerAddress("localhost", 1), table=ReadOptions.of(columns=columns))

    with pytest.raises(LimitExceeded, match=r"uses the columns dose; this device uses only age, mass \(--columns\)"):
        accept_plan(PLAN, NoStore(), options("age,mass"))  # type: ignore[arg-type]
    assert accept_plan(PLAN, NoStore(), options("dose,age,mass")) is None  # type: ignore[arg-type]


def test_a_device_declines_a_run_of_which_it_takes_no_part(bench: Any) -> None:
    with pytest.raises(LimitExceeded, match="takes no part in the run first, only in second"):
        bench.run(limits=OrderLimits(runs=("second",)))
    assert [trouble.reason for trouble in bench.server.seen.troubles if not trouble.order_id] or not bench.server.seen.submits
    assert bench.run(limits=OrderLimits(runs=("first",), models=("mlr",)), token=None).exists()


@pytest.mark.parametrize("limits", [PrivacyLimits(), PrivacyLimits(metrics="none")])
def test_why_its_data_do_not_fit_is_told_only_where_texts_may_be(bench: Any, limits: PrivacyLimits) -> None:
    """A server could leave out classes and tokens, to be told which ones occur and how often."""
    bench.server._make_plan(Profile("tabular", (6,), ["ant", "bee"], 40, 20))
    with pytest.raises(UndeclaredLabels, match="'cow'"):
        bench.run(privacy=limits)
    [told] = [trouble.reason for trouble in bench.server.seen.troubles]
    hidden = "its data do not fit the plan (undeclared-labels); its own log says why"
    assert (told == hidden) if limits.metrics else ("'cow'" in told)


@pytest.mark.parametrize("bound", [float("nan"), float("inf")])
def test_a_bound_that_bounds_nothing_is_refused(bound: float) -> None:
    for limits in ({"epsilon": bound}, {"delta": bound}):
        with pytest.raises(AttuneError, match="finite number"):
            PrivacyLimits(**limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "when", "may"),
    [
        ("23:10", ("22:00-06:00",), True),
        ("05:59", ("22:00-06:00",), True),
        ("06:00", ("22:00-06:00",), False),
        ("12:00", ("22:00-06:00", "12:00-13:00"), True),
        ("13:00", ("12:00-13:00",), False),
        ("00:00", ("00:00-00:00",), True),
    ],
)
def test_a_device_trains_at_the_hours_of_its_owner(now: str, when: tuple[str, ...], may: bool) -> None:
    assert ResourceLimits(when=when).when == when
    assert bool(unmet(when, clock=lambda: now)) is not may
    assert unmet((*when, "idle"), load=lambda: 1e9, clock=lambda: now).startswith(
        "the machine is busy" if may else f"it is {now}"
    )


def test_the_file_is_plain_toml() -> None:
    assert set(msgspec.toml.decode(example())) <= set(KEYS)
