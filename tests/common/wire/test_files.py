"""Tensor files: byte-exact against the safetensors package both ways, any order of writing, lazy reading, clean failure."""

import errno
import os

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attune.common.errors import DiskFull
from attune.common.wire import malformed as bad
from attune.common.wire.blobs import Buffer, Target
from attune.common.wire.digest import digest_of
from attune.common.wire.files import Blob, TensorFile, TensorWriter, read_tensors, write_tensors
from attune.common.wire.header import TensorSpec, check_manifest
from attune.common.wire.tensors import DTYPES, bytes_of, manifest_of
from attune.fedserver.lab.aggregators.stored import ArrayFile
from tests.raising import malformed


def test_writes_exactly_the_bytes_of_the_package(tmp_path, zoo):
    ours = write_tensors(tmp_path / "ours", zoo)
    theirs = safetensors.torch.save(zoo)
    assert (tmp_path / "ours").read_bytes() == theirs
    assert ours == Blob("ours", digest_of(theirs), len(theirs))


def test_golden_bytes(tmp_path):
    path = file_of(tmp_path / "golden", {"w": torch.tensor([[1.0, -2.0]]), "n": torch.tensor(3)})
    header = b'{"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]}}'
    assert len(header) == 109
    data = b"\x03\0\0\0\0\0\0\0" + b"\0\0\x80\x3f" + b"\0\0\0\xc0"
    assert path.read_bytes() == b"\x70\0\0\0\0\0\0\0" + header + b"   " + data


def test_reads_what_the_package_writes_and_the_package_reads_what_we_write(tmp_path, zoo, same_bits):
    theirs = tmp_path / "theirs"
    safetensors.torch.save_file(zoo, theirs, metadata={"format": "pt", "note": 'é "quoted" \\ \n \x01 \x7f'})
    same_bits(read_tensors(theirs), zoo)
    with TensorFile(theirs) as file:
        same_bits(file, zoo)
    ours = file_of(tmp_path / "ours", zoo)
    same_bits(safetensors.torch.load_file(ours), zoo)
    with safetensors.safe_open(ours, "pt") as file:
        assert file.metadata() is None
    with TensorFile(ours) as mine:
        check_manifest(mine.manifest, manifest_of(zoo), "ours")


def test_arrays_have_the_bits_of_the_tensors(tmp_path, zoo):
    """Read without torch, as views do; bfloat16 becomes float32, which has all its values."""
    with ArrayFile(file_of(tmp_path / "zoo", zoo)) as file:
        assert list(file) == list(TensorFile(tmp_path / "zoo"))
        for name, tensor in zoo.items():
            expected = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
            assert (file[name].dtype, file[name].shape) == (expected.dtype, expected.shape), name
            quiet = np.isnan(expected)  # a conversion may set a bit of a signalling NaN
            assert np.array_equal(np.isnan(file[name]), quiet), name
            assert file[name][~quiet].tobytes() == expected[~quiet].tobytes(), name


def test_arrays_of_a_damaged_file_are_refused(tmp_path, blob_of):
    (tmp_path / "b").write_bytes(blob_of({"b": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}) + b"\2")
    with ArrayFile(tmp_path / "b") as file, malformed("not-boolean"):
        file["b"]


def file_of(path, tensors):
    write_tensors(path, tensors)
    return path


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
names = st.text(st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, st.tuples(st.sampled_from(sorted(DTYPES)), shapes, st.integers(0, 99)), max_size=6))
def test_any_dtypes_shapes_and_names_come_back(tmp_path, same_bits, drawn):
    tensors = {}
    for name, (dtype, shape, seed) in drawn.items():
        generator = torch.Generator().manual_seed(seed)
        tensors[name] = torch.randint(0, 2, shape, generator=generator).to(DTYPES[dtype])
    path = file_of(tmp_path / "file", tensors)
    assert path.read_bytes() == safetensors.torch.save(tensors)
    same_bits(read_tensors(path), tensors)
    with TensorFile(path) as file:
        same_bits(file, tensors)


def test_tied_strided_expanded_and_negated_tensors(tmp_path):
    base = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    tensors = {"base": base, "tied": base, "turned": base.T, "slice": base[1:3, ::2], "row": base[0:1].expand(5, 6)}
    tensors["negative"] = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    read = read_tensors(file_of(tmp_path / "file", tensors))
    for name, tensor in tensors.items():
        assert read[name].equal(tensor), name
    assert read["negative"].tolist() == [-2.0, 4.0]


def test_parameters_are_written_without_their_graph(tmp_path):
    layer = torch.nn.Linear(3, 2)
    read = read_tensors(file_of(tmp_path / "file", dict(layer.named_parameters())))
    assert read["weight"].equal(layer.weight.detach())
    assert not read["weight"].requires_grad


@pytest.mark.parametrize("turn", [lambda names: names, reversed, lambda names: names[1:] + names[:1]])
def test_any_order_of_puts_gives_the_same_blob(tmp_path, zoo, turn):
    expected = write_tensors(tmp_path / "expected", zoo)
    with TensorWriter(tmp_path / "file", manifest_of(zoo)) as writer:
        for name in turn(list(writer.layout.manifest)):
            writer.put(name, zoo[name])
    assert writer.blob == Blob("file", expected.digest, expected.size)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "expected").read_bytes()
    assert digest_of((tmp_path / "file").read_bytes()) == writer.blob.digest


def test_equal_tensors_in_another_order_have_one_digest(tmp_path, zoo):
    turned = dict(reversed(zoo.items()))
    assert write_tensors(tmp_path / "a", zoo).digest == write_tensors(tmp_path / "b", turned, durable=True).digest


def test_read_all_is_one_buffer(tmp_path):
    tensors = {"a": torch.ones(100), "b": torch.ones(50, dtype=torch.float16), "c": torch.ones(3, dtype=torch.bool)}
    read = read_tensors(file_of(tmp_path / "file", tensors))
    assert len({tensor.untyped_storage().data_ptr() for tensor in read.values()}) == 1


def test_tensor_file_is_lazy_and_its_tensors_are_independent(tmp_path):
    path = file_of(tmp_path / "file", {"a": torch.zeros(2), "b": torch.ones(2)})
    file = TensorFile(path)
    assert list(file) == ["a", "b"]
    assert len(file) == 2
    file["a"].add_(5)
    assert file["a"].tolist() == [0.0, 0.0]
    assert "c" not in file
    with pytest.raises(KeyError):
        file["c"]
    os.truncate(path, path.stat().st_size - 1)
    assert "b" in file
    with pytest.raises(bad.Truncated):
        file["b"]
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file"):
        file["a"]


def test_writer_refuses_what_is_not_in_the_manifest(tmp_path):
    writer = TensorWriter(tmp_path / "file", {"w": TensorSpec("F32", (2, 3)), "v": TensorSpec("BF16", ())})
    for kind, name, tensor in [
        ("unexpected-tensor", "x", torch.zeros(2, 3)),
        ("wrong-dtype", "w", torch.zeros(2, 3, dtype=torch.float64)),
        ("wrong-shape", "w", torch.zeros(3, 2)),
        ("unsupported-tensor", "w", torch.zeros(2, 3, device="meta")),
        ("unsupported-tensor", "w", torch.zeros(2, 3).to_sparse()),
    ]:
        with malformed(kind, match=repr(name)):
            writer.put(name, tensor)
    writer.put("w", torch.ones(2, 3))
    with malformed("put-twice"):
        writer.put("w", torch.ones(2, 3))
    with malformed("missing-tensor", match="'v'"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_removes_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError), TensorWriter(tmp_path / "file", {"w": TensorSpec("F32", (2,))}):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    old = file_of(tmp_path / "file", {"w": torch.zeros(2)})
    with malformed("unsupported-tensor", match="complex64"):
        write_tensors(tmp_path / "file", {"w": torch.zeros(2, dtype=torch.complex64)})

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskFull, match="free some space"):
        write_tensors(tmp_path / "file", {"w": torch.ones(2)})
    assert list(tmp_path.iterdir()) == [old]
    assert read_tensors(old)["w"].tolist() == [0.0, 0.0]


def test_short_writes_are_continued(tmp_path, zoo, monkeypatch):
    expected = write_tensors(tmp_path / "expected", zoo)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    assert write_tensors(tmp_path / "short", zoo).digest == expected.digest
    assert (tmp_path / "short").read_bytes() == (tmp_path / "expected").read_bytes()


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path):
    with pytest.raises(DiskFull, match="MiB"):
        TensorWriter(tmp_path / "huge", {"w": TensorSpec("F64", (1 << 50,))})
    assert list(tmp_path.iterdir()) == []


def test_a_sparse_file_of_over_4_gib_is_read_at_its_far_end(tmp_path):
    rows = (4 << 30) // 1024 + 3
    writer = TensorWriter(tmp_path / "big", {"a": TensorSpec("F64", (rows, 128)), "b": TensorSpec("F32", (3,))})
    os.truncate(tmp_path / "big", writer.layout.size)
    writer.put("b", torch.tensor([1.0, 2.0, 3.0]))
    with TensorFile(tmp_path / "big") as file:
        assert file.manifest == writer.layout.manifest
        assert writer.layout.spans["b"][0] > 4 << 30
        assert file["b"].tolist() == [1.0, 2.0, 3.0]
    with safetensors.safe_open(tmp_path / "big", "pt") as theirs:
        assert theirs.get_slice("a").get_shape() == [rows, 128]
        assert theirs.get_tensor("b").tolist() == [1.0, 2.0, 3.0]
    writer.abort()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_tensors_on_an_accelerator(tmp_path, zoo, same_bits):
    there = {name: tensor.to("cuda") for name, tensor in zoo.items()}
    same_bits(read_tensors(file_of(tmp_path / "file", there)), zoo)


def test_one_number_out_of_a_larger_tensor_has_its_bytes():
    """Take a column of one row: torch calls it contiguous, and its stride is that of the rows."""
    column = torch.arange(16.0).reshape(2, 8)[:1, 3]
    assert column.is_contiguous() and column.stride() == (8,)
    assert bytes(bytes_of(column)) == np.float32(3).tobytes()
    assert bytes(bytes_of(column.reshape(()))) == np.float32(3).tobytes() and bytes(bytes_of(column[:0])) == b""


def test_the_bytes_of_a_contiguous_tensor_are_not_copied():
    tensor = torch.zeros(10, 100, dtype=torch.bfloat16)
    view = bytes_of(tensor)
    tensor[0, 0] = 1.0
    assert len(view) == 2000
    assert bytes(view[:2]) == b"\x80\x3f"  # 1.0 in bfloat16: sign 0, exponent 127, fraction 0


class Parts(Target):
    """Target in memory that keeps its parts."""

    name = "parts"

    def __init__(self, size):
        self.data, self.digest = bytearray(size), None

    def write(self, data, offset):
        self.data[offset : offset + len(data)] = data

    def read_into(self, target, offset):
        target[:] = self.data[offset : offset + len(target)]

    def finish(self, digest, size):
        return Blob("parts", digest, size)

    def abort(self):
        self.data = bytearray()


def test_what_is_not_a_file_has_the_same_bytes(tmp_path, zoo, same_bits):
    made = []

    def create(size):
        made.append(Parts(size))
        return made[-1]

    blob = write_tensors(create, zoo)
    assert bytes(made[0].data) == safetensors.torch.save(zoo)
    assert blob == Blob("parts", digest_of(bytes(made[0].data)), len(made[0].data))
    same_bits(read_tensors(Buffer("parts", made[0].data)), zoo)
    file = TensorFile(Buffer("parts", made[0].data))
    same_bits(file, zoo)
    file.close()
    with pytest.raises(OSError, match="closed"):
        file["a"]
    with pytest.raises(bad.Truncated, match="parts"):
        Buffer("parts", b"12").read_into(memoryview(bytearray(3)), 0)


def test_a_span_of_a_tensor_is_read_alone(tmp_path):
    tensors = {"w": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6), "b": torch.tensor([True, False, True])}
    with TensorFile(file_of(tmp_path / "file", tensors)) as file:
        for start, end in [(0, 24), (5, 13), (7, 7), (23, 24)]:
            assert file.span("w", start, end).equal(tensors["w"].reshape(-1)[start:end])
        assert file.span("b", 1, 3).tolist() == [False, True]


def test_a_tensor_is_read_in_blocks_through_one_buffer(tmp_path):
    tensors = {"w": torch.arange(10.0).reshape(2, 5), "none": torch.empty(0, 3), "one": torch.tensor(7.0)}
    with TensorFile(file_of(tmp_path / "file", tensors)) as file:
        assert [(at, block.tolist()) for at, block in file.blocks("w", 4)] == [
            (0, [0.0, 1.0, 2.0, 3.0]),
            (4, [4.0, 5.0, 6.0, 7.0]),
            (8, [8.0, 9.0]),
        ]
        assert len({block.data_ptr() for _, block in file.blocks("w", 4)}) == 1
        assert list(file.blocks("none", 4)) == []
        assert [(at, block.tolist()) for at, block in file.blocks("one", 4)] == [(0, [7.0])]


def test_bytes_that_are_not_those_of_the_digest_are_named(tmp_path):
    blob = write_tensors(tmp_path / "file", {"w": torch.zeros(4)})
    assert read_tensors(tmp_path / "file", digest=blob.digest)["w"].tolist() == [0.0] * 4
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(bad.DigestMismatch, match=f"{tmp_path / 'file'} is damaged"):
        read_tensors(tmp_path / "file", digest=blob.digest)
