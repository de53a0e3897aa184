"""`fedclient partition`: options, settings of schemes and refusals, as typed, and that alpha of Synthetic changes no label."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import attune
from attune.fedclient.cli import main
from attune.simulation.partition.schemes import registry
from attune.simulation.partition.schemes.cut import generator
from attune.simulation.partition.schemes.scheme_settings import SyntheticSettings
from attune.simulation.partition.schemes.synthetic import samples


@pytest.fixture
def cut(tmp_path: Path):
    """Return a function that runs the command with these words and --out, on a table of two sites by default."""
    rows = [f"{n},{n % 3},{'north' if n < 24 else 'south'}" for n in range(48)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,site", *rows]))

    def call(*words: Any) -> Result:
        given = [str(word) for word in words]
        if "--dataset" not in given and "synthetic" not in given:
            given += ["--dataset", str(tmp_path / "t.csv"), *([] if "--by" in given else ["--apart", "site"])]
        return CliRunner().invoke(main, ["partition", "--out", str(tmp_path / "out"), *given])

    return call


def test_natural_clients_of_a_table(cut, tmp_path):
    result = cut("--scheme", "natural", "--by", "site", "--set", "test=0.5")
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").glob("*")} == {
        "shard-north", "shard-south", "partition.json", "partition.png",
    }  # fmt: skip
    with np.load(tmp_path / "out" / "shard-south" / "test.npz") as test:
        assert len(test["y"]) == 12 and (test["x"] >= 24).all() and np.bincount(test["y"]).tolist() == [4, 4, 4]
    record = json.loads((tmp_path / "out" / "partition.json").read_text())
    assert record["settings"]["by"] == "site" and record["clients"][0] == {
        "shard": "shard-north", "train": 12, "test": 12, "sigma": 0.0,
    }  # fmt: skip


def test_settings_by_flag_and_by_set(cut, tmp_path):
    assert cut("--scheme", "pathological", "--clients", 3, "--classes-per-client", 1).exit_code == 0
    record = json.loads((tmp_path / "out" / "partition.json").read_text())
    assert record["settings"] == {"classes_per_client": 1}
    result = cut("--scheme", "synthetic", "--clients", 3, "--set", "features=5", "--alpha", 1)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out" / "partition.json").read_text())
    assert record["settings"] == {"alpha": 1.0, "beta": 0.5, "features": 5, "classes": 10, "test": 0.25}


def test_the_older_flags_are_never_refused(cut):
    result = cut("--scheme", "iid", "--clients", 2, "--alpha", 0.5, "--classes-per-client", 2)
    assert result.exit_code == 0 and "scheme iid has no --alpha; it is ignored" in result.stderr


def test_noise_and_normalisation(cut, tmp_path):
    assert cut("--scheme", "iid", "--clients", 2, "--noise", 3, "--normalise", "channel").exit_code == 0
    with np.load(tmp_path / "out" / "shard1" / "train.npz") as train:
        assert train["x"].dtype == np.float32 and train["x"].std() > 2


def test_a_long_list_of_clients_is_cut_short(cut):
    result = cut("--scheme", "synthetic", "--set", "features=2")
    assert "... and 70 more clients" in result.output
    assert "100 clients with 205795 samples: at least 250, median 577.5, at most 25810" in result.output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--scheme", "pachinco", "--clients", 2), 2, "did you mean 'pachinko'"),
        (
            ("--scheme", "dirichlet", "--clients", 2, "--set", "alfa=1"),
            2,
            "unknown setting dirichlet.alfa (did you mean 'alpha'?)",
        ),
        (("--scheme", "dirichlet", "--clients", 2, "--set", "a.b=1"), 2, "--set takes KEY=VALUE here"),
        (("--scheme", "dirichlet", "--clients", 2, "--set", "alpha=x"), 2, "dirichlet"),
        (("--scheme", "iid", "--clients", 2, "--by", "site"), 2, "unknown setting iid.by"),
        (("--scheme", "iid"), 2, "say --clients"),
        (("--scheme", "natural", "--by", "sit"), 2, "no column 'sit' (did you mean 'site'?)"),
        (("--scheme", "synthetic", "--dataset", "digits"), 2, "leave --dataset out"),
        (("--scheme", "iid", "--clients", 2, "--dataset", "nowhere"), 2, "no data set 'nowhere'"),
        (("--scheme", "iid", "--clients", 2, "--dataset", "digits", "--key", "id"), 2, "--key is of tables"),
    ],
)
def test_refusals(cut, words, code, message):
    result = cut(*words)
    assert result.exit_code == code and message in result.output, result.output
    assert not isinstance(result.exception, ValueError)


def test_the_key_of_rows_is_no_feature_and_is_complete(cut, tmp_path):
    (tmp_path / "k.csv").write_text("v,case,y\n" + "".join(f"{n % 7},P{n},{n % 2}\n" for n in range(40)))
    result = cut("--scheme", "iid", "--clients", 2, "--dataset", tmp_path / "k.csv", "--key", "case")
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "shard0" / "meta.json").read_text())["columns"] == ["v"]
    (tmp_path / "gap.csv").write_text((tmp_path / "k.csv").read_text().replace("P3,", "?,"))
    result = cut("--scheme", "iid", "--clients", 2, "--dataset", tmp_path / "gap.csv", "--key", "case")
    assert result.exit_code == 6 and "'case', which is the key" in result.output


@pytest.mark.parametrize("form", ["csv", "npz"])
def test_words_for_missing_values(cut, tmp_path, form):
    labels = [("NA", "EU")[n % 2] for n in range(40)]
    path = tmp_path / f"w.{form}"
    if form == "npz":
        np.savez(path, x=np.random.default_rng(0).normal(size=(40, 2)), y=np.array(labels))
    else:
        path.write_text("v,y\n" + "".join(f"{-999 if n == 7 else n % 9},{labels[n]}\n" for n in range(40)))
    words = ("--scheme", "iid", "--clients", 2, "--dataset", path, "--missing", "median")
    assert cut(*words).exit_code == 6
    result = cut(*words, "--missing-words", "-999")
    assert result.exit_code == 0, result.output
    for shard in ("shard0", "shard1"):
        with np.load(tmp_path / "out" / shard / "train.npz") as train:
            assert train["x"].min() > -999 and set(train["y"].tolist()) == {"NA", "EU"}


def test_help_names_the_schemes_of_the_papers():
    text = CliRunner().invoke(main, ["partition", "--help"]).output
    assert {"iid", "pathological", "dirichlet"} <= set(registry.SCHEMES) and "iid, pathological, dirichlet" in text


ROOT = Path(attune.__file__).resolve().parent


def test_no_label_depends_on_alpha() -> None:
    for client in range(10):
        drawn = [samples(500, SyntheticSettings(alpha=alpha), generator(7, "synthetic", client)) for alpha in (0.0, 0.5, 50.0)]
        for x, y in drawn[1:]:
            assert np.array_equal(x, drawn[0][0]) and np.array_equal(y, drawn[0][1])


def test_it_is_said_where_alpha_is_explained() -> None:
    assert "- **E8** `alpha` of Synthetic has no effect" in (ROOT / "docs/methods/fedmcsa.md").read_text(encoding="utf-8")
    [row] = [
        line
        for line in (ROOT / "docs/data.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `synthetic` | `alpha`")
    ]
    assert "labellings differ" not in row and "E8" in row
    assert "E8" in CliRunner().invoke(main, ["partition", "--help"]).output
