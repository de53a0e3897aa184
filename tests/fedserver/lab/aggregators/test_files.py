"""Updates in files: mixed to the same bits as in memory, and each byte of them read once."""

from contextlib import ExitStack

import pytest
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings
from attune.common.wire.files import TensorFile, write_tensors
from attune.fedserver.lab.aggregators.attention import Mcsa
from attune.fedserver.lab.aggregators.base import MemoryVault

SHAPES = {"a.weight": (7, 5), "a.bias": (7,), "b.weight": (3, 7), "steps": ()}
UNITS = {"a": ["a.weight", "a.bias"], "b": ["b.weight"], "steps": ["steps"]}


def tensors(seed, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in SHAPES.items() if shape}
    return found | {"steps": torch.tensor(seed)}


def rounds(each, dtype):
    """Run two rounds, of which the second one replaces values of the first; `each` makes a cohort's updates."""
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(), vault, 0, UNITS)
    aggregator.start(tensors(0, dtype))
    for number in (1, 2):
        with ExitStack() as stack:
            made = {f"c{i}": tensors(10 * number + i, dtype) for i in range(4)}
            aggregator.close_round([PartUpdate(name, 1.0 + i, each(stack, name, made[name])) for i, name in enumerate(made)])
    return {key: dict(vault.read(key)) for key in vault.keys()}  # noqa: SIM118 (a vault is not a mapping)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_bits_are_those_of_memory_and_every_byte_is_read_once(dtype, tmp_path, monkeypatch):
    read, fill = [], TensorFile._fill

    def counted(self, out, name, start):
        read.append(out.nbytes if out.is_floating_point() else 0)
        fill(self, out, name, start)

    monkeypatch.setattr(TensorFile, "_fill", counted)

    def on_disk(stack, name, made):
        write_tensors(tmp_path / f"{name}.safetensors", made)
        return stack.enter_context(TensorFile(tmp_path / f"{name}.safetensors"))

    found, expected = rounds(on_disk, dtype), rounds(lambda stack, name, made: made, dtype)
    assert found.keys() == expected.keys()
    assert all(found[key][name].equal(tensor) for key in expected for name, tensor in expected[key].items())
    assert sum(read) == 2 * 4 * sum(tensor.nbytes for tensor in tensors(0, dtype).values() if tensor.is_floating_point())
