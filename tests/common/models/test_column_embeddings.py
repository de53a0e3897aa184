"""Indices of categories in a table become vectors, in every model for tables."""

from __future__ import annotations

import msgspec
import pytest
import torch

from attune.common.models.column_embeddings import ColumnEmbeddings, width_for
from attune.common.models.registry import build, default_spec

EMBEDDED = {"1": 20, "3": 30}


def test_numbers_stay_and_indices_become_vectors() -> None:
    layer = ColumnEmbeddings(4, EMBEDDED)
    x = torch.tensor([[0.5, 3.0, -1.0, 29.0], [0.25, 99.0, 2.0, 0.0]])
    out = layer(x)
    assert out.shape == (2, 2 + width_for(20) + width_for(30)) and torch.equal(out[:, :2], x[:, [0, 2]])
    assert torch.equal(out[1, 2 : 2 + width_for(20)], layer.tables[0].weight[19])


@pytest.mark.parametrize("name", ["mlr", "dnn", "transformer"])
def test_every_model_for_tables_learns_vectors(name: str) -> None:
    plain = default_spec("tabular", (4,), 3, 0, name, {})
    assert b"embedded" not in msgspec.json.encode(plain)
    model = build(msgspec.structs.replace(plain, embedded=EMBEDDED), 0)
    x = torch.rand(5, 4) * 18
    model(x).sum().backward()
    tables = [p for key, p in model.named_parameters() if "tables" in key]
    assert model(x).shape == (5, 3) and len(tables) == 2
    assert all(p.grad is not None and (p.grad != 0).any() for p in tables) or name == "transformer"
    one_by_one = torch.func.vmap(lambda row: torch.func.functional_call(model, dict(model.named_parameters()), (row[None],))[0])
    assert torch.allclose(one_by_one(x), model(x), atol=1e-5)
