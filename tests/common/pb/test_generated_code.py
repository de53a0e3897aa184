"""The generated protobuf code is that of proto/attune/v1 by the pinned generator (`make proto`)."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import Message

from attune.common.pb import federation_pb2, federation_pb2_grpc
from attune.fedserver.pb import admin_pb2, admin_pb2_grpc

ROOT = Path(__file__).parents[3]
FOLDERS = {"common/pb": "federation", "fedserver/pb": "admin"}
MODULES = {"common/pb": (federation_pb2, federation_pb2_grpc), "fedserver/pb": (admin_pb2, admin_pb2_grpc)}


def pinned(name: str) -> str:
    """Return the version of a distribution in constraints-lowest.txt."""
    [found] = re.findall(rf"^{name}==(\S+)$", (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generate the code with this environment's generator, which may be newer than the pinned one."""
    out = tmp_path_factory.mktemp("pb")
    command = ["-m", "grpc_tools.protoc", *(f"-Iattune/{folder}=proto/attune/v1" for folder in FOLDERS)]
    targets = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    sources = [f"attune/{folder}/{name}.proto" for folder, name in FOLDERS.items()]
    subprocess.run([sys.executable, *command, *targets, *sources], cwd=ROOT, check=True)
    return out / "attune"


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_committed_descriptors_are_those_of_the_protos(generated: Path, folder: str) -> None:
    name = f"{folder}/{FOLDERS[folder]}_pb2.py"
    fresh, committed = (FileDescriptorProto.FromString(_descriptor(root / name)) for root in (generated, ROOT))
    assert fresh.message_type or fresh.service
    assert committed == fresh


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_committed_stubs_for_type_checkers_are_those_of_the_protos(generated: Path, folder: str) -> None:
    name = f"{folder}/{FOLDERS[folder]}_pb2.pyi"
    fresh, committed = (_declared((root / name).read_text(encoding="utf-8")) for root in (generated, ROOT))
    assert len(fresh) >= 3
    assert committed == fresh


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_committed_calls_are_those_of_the_protos(folder: str) -> None:
    """Compare both ends as gRPC sees them. The descriptors are compared above."""
    messages, calls = MODULES[folder]
    file: FileDescriptor = messages.DESCRIPTOR
    methods = {
        f"/{service.full_name}/{method.name}": method
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods
    assert _served(calls, file) == {path: (*_streams(one), one.input_type.full_name) for path, one in methods.items()}
    assert _called(calls, file) == {path: (*_streams(one), one.output_type.full_name) for path, one in methods.items()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_runs_on_the_lowest_versions_that_are_allowed(folder: str) -> None:
    """Check this, because generated code refuses an older protobuf or grpcio than its generator's."""
    messages, calls = MODULES[folder]
    [stated] = re.findall(r"^# Protobuf Python Version: (\S+)$", Path(messages.__file__ or "").read_text(), re.MULTILINE)
    assert stated == pinned("protobuf")
    assert calls.GRPC_GENERATED_VERSION == pinned("grpcio-tools") == pinned("grpcio")


@pytest.mark.skipif(
    version("grpcio-tools") != pinned("grpcio-tools"), reason="needs the pinned generator: run by `make lowest`"
)
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_committed_code_is_the_pinned_generators_to_the_letter(generated: Path, folder: str) -> None:
    fresh = {path.name: path.read_text() for path in (generated / folder).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / folder).glob("*_pb2*.py*")}
    assert fresh.keys() == committed.keys()
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def _descriptor(path: Path) -> bytes:
    """Return the serialized file descriptor that a _pb2.py registers: the argument of AddSerializedFile."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    [found] = [ast.literal_eval(call.args[0]) for call in calls if call.func.attr == "AddSerializedFile"]
    return bytes(found)


def _declared(stub: str) -> dict[str, set[str]]:
    """Return the annotated names of each class of a .pyi, and of the module itself."""
    classes = [node for node in ast.walk(ast.parse(stub)) if isinstance(node, ast.ClassDef | ast.Module)]
    return {
        getattr(one, "name", ""): {ast.unparse(line) for line in one.body if isinstance(line, ast.AnnAssign)} for one in classes
    }


def _streams(method: MethodDescriptor) -> tuple[bool, bool]:
    return method.client_streaming, method.server_streaming


Call = tuple[bool, bool, str]  # whether requests are streamed, whether responses are streamed, the type that is read


def _read_by(deserialize: Callable[[bytes], Message]) -> str:
    return str(deserialize(b"").DESCRIPTOR.full_name)


def _served(calls: ModuleType, file: FileDescriptor) -> dict[str, Call]:
    """Return the calls that the generated code registers on a server."""
    found: dict[str, Call] = {}

    class Recorder:
        def add_generic_rpc_handlers(self, handlers: object) -> None:
            """No-op: a server has this method; the next call registers the same in another form."""

        def add_registered_method_handlers(self, service: str, handlers: dict[str, grpc.RpcMethodHandler]) -> None:
            for name, one in handlers.items():
                read = _read_by(one.request_deserializer)
                found[f"/{service}/{name}"] = one.request_streaming, one.response_streaming, read

    for service in file.services_by_name:
        getattr(calls, f"add_{service}Servicer_to_server")(getattr(calls, f"{service}Servicer")(), Recorder())
    return found


def _called(calls: ModuleType, file: FileDescriptor) -> dict[str, Call]:
    """Return the calls that the generated stubs request from a channel."""
    found: dict[str, Call] = {}

    class Recorder:
        def __getattr__(self, kind: str) -> Callable[..., None]:
            """Return a recorder of calls; `kind` is unary_unary, unary_stream, stream_unary or stream_stream."""
            requests, responses = (side == "stream" for side in kind.split("_"))

            def register(path: str, response_deserializer: Callable[[bytes], Message], **_: object) -> None:
                found[path] = requests, responses, _read_by(response_deserializer)

            return register

    for service in file.services_by_name:
        getattr(calls, f"{service}Stub")(Recorder())
    return found
