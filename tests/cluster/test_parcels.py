"""How rows are packed and work is cut, for any tensors and any units."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.wire.tensors import DTYPES, manifest_of
from attune.fedserver.lab.aggregators.base import Block, Unit
from attune.fedserver.lab.cluster.parcels import stages_of
from attune.fedserver.lab.cluster.rows import received, row_of, sent, tensors_in

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))
tensors = st.dictionaries(st.text("abc.", min_size=1, max_size=6), st.tuples(dtypes, shapes, st.integers(0, 1000)), max_size=6)


@given(tensors)
@settings(deadline=None)
def test_a_row_has_every_bit_of_its_tensors(drawn):
    given_ = {}
    for name, (dtype, shape, seed) in drawn.items():
        bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
        given_[name] = bits.to(DTYPES[dtype])
    row = row_of(given_, manifest_of(given_))
    row.flags.writeable = False
    for found in (tensors_in(row, manifest_of(given_)), received(sent(given_))):
        assert found.keys() == given_.keys()
        for name, tensor in given_.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
            assert torch.equal(found[name].long(), tensor.long())


units_drawn = st.lists(st.tuples(st.lists(st.integers(0, 90), min_size=1, max_size=5), st.booleans()), max_size=12)


@given(units_drawn, st.integers(1, 300))
def test_parcels_have_every_block_once_in_order_and_split_no_unit_of_one_block(drawn, parcel_bytes):
    units, sizes = [], {}
    for k, (numbers, summed) in enumerate(drawn):
        blocks = []
        for j, size in enumerate(numbers):
            sizes[f"{k}.{j}"] = torch.empty(size, dtype=torch.uint8)
            blocks.append(Block(f"u{k}", (f"{k}.{j}",)))
        units.append(Unit(f"u{k}", tuple(blocks), summed))
    manifest = manifest_of(sizes)
    stages = stages_of(units, manifest, parcel_bytes)
    assert [unit for stage in stages for unit in stage.units] == units
    parcels = [parcel for stage in stages for parcel in stage.parcels]
    assert [block for parcel in parcels for block in parcel.blocks] == [block for unit in units for block in unit.blocks]
    assert [parcel.number for parcel in parcels] == list(range(len(parcels)))
    for stage in stages:
        assert len(stage.units) == 1 or len(stage.parcels) == 1
        assert len({unit.summed for unit in stage.units}) == 1
        for parcel in stage.parcels:
            total = sum(sizes[name].nbytes for name in parcel.manifest(manifest))
            assert total <= parcel_bytes or len(parcel.blocks) == 1
