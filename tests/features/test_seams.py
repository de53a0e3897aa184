"""Seams: each is called by the core and answered by one feature, and without that feature it is less, or a refusal."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

from attune import seams
from attune.common.config import ServerSettings
from attune.common.errors import SettingError
from attune.fedserver import cli

ROOT = Path(seams.__file__).resolve().parent
CORE = ("common", "fedserver", "fedclient", "simulation")


def called() -> set[str]:
    """Return the seams that the core uses."""
    texts = [path.read_text(encoding="utf-8") for top in CORE for path in (ROOT / top).rglob("*.py")]
    calling = [text for text in texts if re.search(r"^ *from attune(\.seams import| import seams)", text, re.MULTILINE)]
    return {name for name in seams.SEAMS for text in calling if re.search(rf"(seams\.|(?<![.\w])){name}\b", text)}


def test_each_seam_is_called_by_the_core_and_answered_by_one_feature() -> None:
    answers = Counter(name for feature in seams.features() for name in feature.answers)
    assert answers == dict.fromkeys(seams.SEAMS, 1)
    assert seams.SEAMS.keys() - called() == set()


def test_an_answer_takes_what_its_seam_gives() -> None:
    for name, seam in seams.SEAMS.items():
        given, taken = (inspect.signature(one).parameters for one in (seam, seams.answer("answers", name)))
        assert [*given] == [*taken][: len(given)]
        assert all(parameter.default is not parameter.empty for parameter in [*taken.values()][len(given) :])


def test_a_feature_has_the_name_of_its_folder_and_a_rank_of_its_own() -> None:
    features = seams.features()
    assert {feature.name for feature in features} == {path.parent.name for path in seams.FOLDER.glob("*/feature.py")}
    assert len({feature.rank for feature in features}) == len(features)
    assert {name: feature.name for feature in features for name in feature.commands} == seams.COMMANDS


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all features away, as if their folders were deleted."""
    monkeypatch.setattr(seams, "features", tuple)


@pytest.mark.usefixtures("bare")
def test_what_needs_an_absent_feature_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, feature in seams.COMMANDS.items():
        monkeypatch.setattr("sys.argv", ["fedserver", command])
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().err == f"fedserver: {seams.absent(feature, f'fedserver {command}')}\n"
    for what, ask in {
        "a dashboard": lambda: seams.watch(True),
        "the executor 'ray'": seams.ray_workers,
        "plot": lambda: seams.pictures_of(None, None, ()),
        "state in s3://b": lambda: seams.remote_storage(tmp_path, "postgresql://h/d", "s3://b"),
    }.items():
        with pytest.raises(SettingError, match=f"{re.escape(what)}.* needs the feature '(web|cluster|remote|pictures)'"):
            ask()


@pytest.mark.usefixtures("bare")
def test_without_the_page_a_server_has_none_and_refuses_to_be_asked_for_it() -> None:
    for asked in (None, "off"):
        with seams.page(None, asked, None, ServerSettings(), "it waits") as url:
            assert url is None
    for asked, server in (("8080", ServerSettings()), (None, ServerSettings(metrics_token_file="token"))):
        with pytest.raises(SettingError, match="needs the feature 'web'"), seams.page(None, asked, None, server, "it waits"):
            pass
