"""The record of version 1: the contract when it was frozen, as a serialized FileDescriptorSet.

It is made once, when a version is frozen, by `python -m tests.protocol.record` from the root of the repository. It refuses to
write a record that lacks something of the present one, because a frozen version does not change.
"""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("v1.binpb")


def load(path: Path = RECORD) -> FileDescriptorSet:
    return FileDescriptorSet.FromString(path.read_bytes())


def compiled() -> FileDescriptorSet:
    """Compile the contract of proto/attune/v1."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        protos = [str(path.relative_to(ROOT / "proto")) for path in sorted((ROOT / "proto/attune/v1").glob("*.proto"))]
        command = ["-m", "grpc_tools.protoc", "-Iproto", "--include_imports", f"--descriptor_set_out={out}", *protos]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
        return load(out)


def facts(files: FileDescriptorSet) -> set[str]:
    """Return everything that a peer relies on, one line each: messages, fields, enum values, calls."""
    found: set[str] = set()
    for file in files.file:
        for message in file.message_type:
            found.update(_of_message(message, file.package))
        for enum in file.enum_type:
            found.update(_of_enum(enum, file.package))
        for service in file.service:
            for call in service.method:
                request = f"{'stream ' if call.client_streaming else ''}{call.input_type}"
                answer = f"{'stream ' if call.server_streaming else ''}{call.output_type}"
                found.add(f"call /{file.package}.{service.name}/{call.name}: {request} -> {answer}")
    return found


def gone(record: FileDescriptorSet, now: FileDescriptorSet) -> list[str]:
    """Return the lines of the record that `now` lacks or has changed."""
    return sorted(facts(record) - facts(now))


def _of_message(message: DescriptorProto, scope: str) -> Iterator[str]:
    name = f"{scope}.{message.name}"
    yield f"message {name}"
    for field in message.field:
        choice = f" of {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else ""
        yield f"field {name}.{field.name} = {field.number}: {_type(field)}{choice}"
    for enum in message.enum_type:
        yield from _of_enum(enum, name)
    for nested in message.nested_type:
        yield from _of_message(nested, name)


def _type(field: FieldDescriptorProto) -> str:
    kind = FieldDescriptorProto.Type.Name(field.type)
    label = FieldDescriptorProto.Label.Name(field.label)
    return f"{label} {kind} {field.type_name}".strip()


def _of_enum(enum: EnumDescriptorProto, scope: str) -> Iterable[str]:
    return (f"enum {scope}.{enum.name}.{value.name} = {value.number}" for value in enum.value)


def main() -> None:
    now = compiled()
    if RECORD.exists() and (lost := gone(load(), now)):
        sys.exit("version 1 is frozen, and the contract no longer has:\n" + "\n".join(lost))
    RECORD.write_bytes(now.SerializeToString(deterministic=True))
    print(f"{len(facts(now))} facts in {RECORD.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
