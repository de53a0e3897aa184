"""A finished model as a file for other programs: it computes the same as the original, or there is no file."""

import importlib.util
import json
import re
import shutil
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from attune.common.config import TrainSettings
from attune.common.errors import NoModel, SettingError
from attune.common.models.registry import build, default_spec
from attune.common.models.structure import tensors_of
from attune.common.plan import Profile
from attune.fedclient.messages import OrderResult
from attune.fedclient.model import artifact, portable
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.model_info import ModelInfo, guarantee_of
from attune.fedserver.core.planning import make_plan, resolve

TINY = {"vit": {"width": 8, "heads": 2, "depth": 1, "patch": 2}, "mlr": {}, "dnn": {}}
CLOSED = [("tabular", "closed-form", False)]
SHAPES = {"images": (4, 6, 1), "tabular": (5,), "series": (6, 3), "tokens": (7,)}
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="ONNX is not installed",
)


def finished(folder, kind="tabular", architecture="dnn", blend=False, method="fedavg"):
    """Write a model with weights drawn from a seed, standardised if its kind is."""
    spec = default_spec(kind, SHAPES[kind], 3, 9 if kind == "tokens" else 0, architecture, TINY.get(architecture, {}))
    last = SHAPES[kind][-1]
    standard = {"mean": [2.0] * last, "std": [3.0] * last} if kind in ("tabular", "series") else None
    weights = {"personalized": 0.75, "local": 0.25} if blend else {}
    info = ModelInfo("a", "f", method, {}, spec, ["x", "y", "z"], TrainSettings(), standardiser=standard, weights=weights)
    tensors = {name: tensors_of(build(spec, seed)) for seed, name in enumerate(weights or {"personalized": 1.0})}
    if architecture == "closed-form":  # which begins with zeros
        tensors["personalized"]["head.weight"].normal_(generator=torch.Generator().manual_seed(0))
    return Model.load(artifact.save(folder / "model", info, tensors))


def labels_by(run, path, x, model):
    return [model.info.classes[index] for index in run(path, x).argmax(-1)]


@pytest.mark.parametrize(
    ("kind", "architecture", "blend"),
    [("tabular", "dnn", False), ("images", "vit", True), ("series", "mlr", False), ("series", "convnet", False), *CLOSED],
)
def test_a_torch_program_predicts_as_the_model_for_any_number_of_samples(tmp_path, kind, architecture, blend):
    model = finished(tmp_path, kind, architecture, blend)
    assert portable.export(model, tmp_path / "out.pt2") <= portable.TOLERANCE
    x = np.random.default_rng(1).normal(2, 3, (21, *SHAPES[kind])).astype(np.float32)
    program = torch.export.load(tmp_path / "out.pt2").module()
    found = program(torch.from_numpy(x))
    assert found.sum(-1).tolist() == pytest.approx([1.0] * 21, abs=1e-5)
    assert [model.info.classes[i] for i in found.argmax(-1)] == model.predict(x)


def fitting(folder, kind, channels, here, pixels=False):
    """Write a model to which samples are fitted, of a device with other channels."""
    shape, architecture = (*SHAPES[kind][:-1], len(channels)), "unet" if pixels else "convnet"
    options = {"width": 2, "depth": 1} if pixels else {}
    spec = msgspec.structs.replace(default_spec(kind, shape, 3, 0, architecture, options, pixels), channels=channels)
    standard = {"mean": [2.0, 5.0], "std": [3.0, 1.0]} if kind == "series" else None
    info = ModelInfo("a", "f", "fedavg", {}, spec, ["x", "y", "z"], TrainSettings(), standardiser=standard, channels=here)
    return Model.load(artifact.save(folder / "model", info, {"personalized": tensors_of(build(spec, 0))}))


@pytest.mark.parametrize("ending", [".pt2", pytest.param(".onnx", marks=needs_onnx)])
@pytest.mark.parametrize(
    ("kind", "channels", "here"), [("images", ["red", "green", "blue"], ["grey"]), ("series", ["p", "q"], ["z", "q", "y"])]
)
def test_an_exported_model_fits_samples_of_any_size_as_the_model_does(tmp_path, kind, channels, here, ending):
    model, out, draw = fitting(tmp_path, kind, channels, here), tmp_path / f"out{ending}", np.random.default_rng(1)
    assert portable.export(model, out) <= portable.TOLERANCE
    for sizes in ((4, 6), (9, 5), (3, 8)):
        x = draw.normal(2, 3, (5, *sizes[: len(SHAPES[kind]) - 1], len(here))).astype(np.float32)
        shares = (portable._run_onnx if ending == ".onnx" else portable._run_program)(out, x)
        assert shares == pytest.approx(model.probabilities(x), abs=portable.TOLERANCE)


def test_labels_of_pixels_come_back_at_the_images_own_size(tmp_path):
    model = fitting(tmp_path, "images", ["red", "green", "blue"], ["grey"], pixels=True)
    x = np.random.default_rng(1).random((2, 10, 7, 1))
    said, shares = np.array(model.predict(x)), model.probabilities(x)
    assert said.shape == (2, 10, 7) and shares.shape == (2, 10, 7, 3)
    assert np.array_equal(said, np.array(["x", "y", "z"])[shares.argmax(-1)])
    inner = np.array(model.predict(np.asarray(model.prepared(x)).transpose(0, 2, 3, 1)))  # of the model's size and channels
    assert np.array_equal(said[:, ::5, 3], inner[:, [0, 2], 3]), "rows 0 and 5 of 10 lie in 0 and 2 of 4, column 3 of 7 in 3"


@needs_onnx
@pytest.mark.parametrize(
    ("kind", "architecture", "blend"),
    [("tabular", "dnn", True), ("images", "vit", False), ("images", "convnet", False), ("series", "convnet", False), *CLOSED],
)
def test_an_onnx_file_predicts_as_the_model(tmp_path, kind, architecture, blend):
    model = finished(tmp_path, kind, architecture, blend)
    assert portable.export(model, tmp_path / "out.onnx") <= portable.TOLERANCE
    x = np.random.default_rng(1).normal(2, 3, (21, *SHAPES[kind])).astype(np.float32)
    assert labels_by(portable._run_onnx, tmp_path / "out.onnx", x, model) == model.predict(x)


@needs_onnx
def test_the_server_in_the_documents_answers_as_the_model(tmp_path, monkeypatch):
    model = finished(tmp_path, blend=True)
    portable.export(model, tmp_path / "model.onnx")
    shutil.copy(tmp_path / "model" / "model.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    [code] = [
        block
        for page in (Path(__file__).parents[3] / "docs").rglob("*.md")
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        if "InferenceSession" in block
    ]
    program, started, _ = code.partition("ThreadingHTTPServer((")
    assert started
    names: dict[str, type[BaseHTTPRequestHandler]] = {}
    exec(program, names)  # noqa: S102
    x = np.random.default_rng(0).normal(2, 3, (9, 5)).astype(np.float32)
    with ThreadingHTTPServer(("127.0.0.1", 0), names["Predict"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        body = json.dumps({"x": x.tolist()}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", body, timeout=60) as reply:
            assert json.load(reply) == {"labels": model.predict(x)}
        server.shutdown()


def test_a_file_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    model = finished(tmp_path)
    original = portable._original
    monkeypatch.setattr(portable, "_original", lambda model, x: original(model, x) + 1e-3)
    with pytest.raises(NoModel, match=r"differ from the original's by up to 0\.001"):
        portable.export(model, tmp_path / "out.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_exported_says_so(tmp_path, monkeypatch):
    model = finished(tmp_path)
    with pytest.raises(SettingError, match=r"must end in \.onnx or \.pt2"):
        portable.export(model, tmp_path / "out.bin")

    def fail(*arguments):
        raise RuntimeError("a graph break\nand more")

    monkeypatch.setattr(portable, "_write_program", fail)
    with pytest.raises(SettingError, match=r"cannot be exported: a graph break\. Use `fedclient predict`"):
        portable.export(model, tmp_path / "out.pt2")
    assert not (tmp_path / "out.pt2").exists()


def test_samples_of_8_bits_are_checked_as_the_model_takes_them(tmp_path):
    model = finished(tmp_path, "images", "vit")
    x = np.random.default_rng(0).integers(0, 256, (4, 4, 6, 1), dtype=np.uint8)
    assert portable.export(model, tmp_path / "out.pt2", x) <= portable.TOLERANCE


# --- the privacy guarantee in model.json: a model has the guarantee only if it follows from the samples through noise

RESULT = OrderResult(order_id="evaluate-1-a", round=1, trained=False, samples=60, epsilon=1.0)
KNN = {"name": "custom", "parts": {"@head": "private", "*": "shared"}, "predictor": "knn"}


@pytest.mark.parametrize(
    ("method", "has_noise"),
    [
        ({"name": "fedper"}, True),
        ({"name": "fedmcsa"}, True),
        ({"name": "mr-mtl"}, True),  # its own model is handed in
        ({"name": "ditto"}, False),  # the own model stays on the device
        ({"name": "fedavg+ft"}, False),
        ({"name": "fedbabu"}, False),
        (KNN, False),  # it remembers samples
        ({"name": "fedmcsa", "dial": True}, False),  # held-out samples choose the mixture
    ],
    ids=lambda value: value.get("predictor", value["name"]) if isinstance(value, dict) else "",
)
def test_a_model_that_is_made_without_noise_is_named(method: dict[str, Any], has_noise: bool) -> None:
    settings = {"method": method, "model": {"name": "dnn"}, "privacy": {"unit": "example", "noise": 1.0, "ranges": [[-3, 3]]}}
    plan = make_plan(resolve(settings), {"a": Profile("tabular", (6,), [0, 1], 60, 20)}, "f")
    guarantee = guarantee_of(plan, RESULT, ["personalized", "common", "local", "finished-common"])
    assert guarantee is not msgspec.UNSET
    assert guarantee.finished == ["finished-common", "local", *([] if has_noise else ["personalized"])]
