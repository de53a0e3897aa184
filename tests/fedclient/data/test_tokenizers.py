"""Text as the tokens of a tokenizer that belongs to a model: rows with padding behind, windows, errors."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.common.errors import SettingError
from attune.fedclient.cli import main
from attune.fedclient.data.makers.alphabets import alphabet_of
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import MakeOptions
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions

tokenizers = pytest.importorskip("tokenizers")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "king", "is", "dead")


def saved(folder: Path, words: tuple[str, ...] = WORDS, padding: int | None = None) -> Path:
    """Write a tokenizer of whole words, with a special token before and after each text."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    if padding is not None:
        made.enable_padding(pad_id=padding, length=12)
    made.enable_truncation(5)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("file", ["", "tokenizer.json"])
def test_rows_have_the_models_marks_and_padding_behind(tmp_path: Path, file: str) -> None:
    """Check that a long text loses words and keeps the last special token; the lengths in the file do not count."""
    alphabet = alphabet_of(str(saved(tmp_path / "t") / file))
    assert alphabet.size == 8
    assert alphabet.rows(["the king", "the king is dead the king", ""], 6).tolist() == [
        [2, 4, 5, 3, 0, 0],
        [2, 4, 5, 6, 7, 3],
        [2, 3, 0, 0, 0, 0],
    ]
    assert alphabet.stream("the duke is dead the king").tolist() == [4, 1, 6, 7, 4, 5]


def test_padding_is_what_the_tokenizer_says(tmp_path: Path) -> None:
    assert alphabet_of(str(saved(tmp_path / "t", padding=7))).rows(["king"], 5).tolist() == [[2, 5, 3, 7, 7]]


def test_a_table_of_text_becomes_a_shard_of_these_tokens(tmp_path: Path) -> None:
    table, out = tmp_path / "kiel.csv", tmp_path / "out"
    table.write_text(
        "said,who,split\n" + "".join(f"the king,{'ab'[n % 2]},{'train' if n < 8 else 'test'}\n" for n in range(12))
    )
    words = ("--text", "said", "--label", "who", "--tokenizer", str(saved(tmp_path / "t")), "--length", "5")
    done = CliRunner().invoke(main, ["shard", str(table), *words, "--out", str(out)])
    assert done.exit_code == 0, done.output
    shard = load_shard(out)
    assert (shard.kind, shard.vocabulary, shard.per_position) == ("tokens", 8, False)
    assert shard.test_x.tolist() == [[2, 4, 5, 3, 0]] * 4
    assert json.loads((out / "meta.json").read_text())["vocabulary"] == 8


def test_a_text_becomes_windows_of_these_tokens(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the king is dead " * 6)
    options = MakeOptions.of(ReadOptions(), "", 4, "", False, "", str(saved(tmp_path / "t")))
    shard = make(tmp_path / "t.txt", options, tmp_path / "out")
    assert shard.per_position and shard.vocabulary == 8
    assert shard.train_x[0].tolist() == [4, 5, 6, 7] and shard.train_y[0].tolist() == [5, 6, 7, 4]


def test_a_tokenizer_that_a_package_carries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "their_words")
    (tmp_path / "their_words" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert alphabet_of("their_words:tokenizer.json").size == 8
    sys.modules.pop("their_words")


def test_what_is_no_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"cannot be read: .*Give its tokenizer.json, or the folder that holds it"):
        alphabet_of(str(tmp_path))
    with pytest.raises(SettingError, match="No module named 'nobodys_words'"):
        alphabet_of("nobodys_words:tokenizer.json")
    with pytest.raises(SettingError, match="has no token to pad short texts with"):
        alphabet_of(str(saved(tmp_path / "t", ("nothing", "[UNK]", "[CLS]", "[SEP]"))))
