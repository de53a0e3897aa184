"""Packing of tensors and cutting of work, for any tensors and any units."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.wire.tensors import DTYPES, manifest_of
from attune.features.cluster.workers import columns_of, pack, unit_batches, unpack
from attune.fedserver.lab.aggregators.base import Block, Unit

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(DTYPES))
tensors = st.dictionaries(st.text("abc.", min_size=1, max_size=6), st.tuples(dtypes, shapes, st.integers(0, 1000)), max_size=6)


@given(tensors)
@settings(deadline=None)
def test_packed_tensors_have_every_bit(drawn):
    given_ = {}
    for name, (dtype, shape, seed) in drawn.items():
        bits = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed))
        given_[name] = bits.to(DTYPES[dtype])
    packed = pack(given_)
    packed.data.flags.writeable = False
    unpacked = unpack(packed)
    assert unpacked.keys() == given_.keys()
    for name, tensor in given_.items():
        assert unpacked[name].dtype == tensor.dtype and unpacked[name].shape == tensor.shape
        assert torch.equal(unpacked[name].long(), tensor.long())


units_drawn = st.lists(st.tuples(st.lists(st.integers(0, 90), min_size=1, max_size=5), st.booleans()), max_size=12)


@given(units_drawn, st.integers(1, 300))
def test_parcels_have_every_block_once_in_order_and_split_no_unit_of_one_block(drawn, parcel_bytes):
    units, sizes = [], {}
    for k, (numbers, applied_here) in enumerate(drawn):
        blocks = []
        for j, size in enumerate(numbers):
            sizes[f"{k}.{j}"] = torch.empty(size, dtype=torch.uint8)
            blocks.append(Block(f"u{k}", (f"{k}.{j}",)))
        units.append(Unit(f"u{k}", tuple(blocks), applied_here))
    manifest = manifest_of(sizes)
    batches = unit_batches(units, manifest, parcel_bytes)
    assert [unit for batch in batches for unit in batch.units] == units
    parcels = [parcel for batch in batches for parcel in batch.parcels]
    assert [block for parcel in parcels for block in parcel] == [block for unit in units for block in unit.blocks]
    for batch in batches:
        assert len(batch.units) == 1 or len(batch.parcels) == 1
        assert len({unit.applied_here for unit in batch.units}) == 1
        for parcel in batch.parcels:
            total = sum(sizes[name].nbytes for name in columns_of(parcel, manifest))
            assert total <= parcel_bytes or len(parcel) == 1
