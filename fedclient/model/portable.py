"""The finished model as one module, and as a file that other programs run: ONNX, or torch.export. Checked against the original.

N samples, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attune.common.durable import replaced
from attune.common.errors import NoModel, SettingError
from attune.common.models.body import body_of
from attune.common.plan import channel_weights
from attune.common.schema import Schema
from attune.fedclient.data.kinds import as_fractions, fit_floats
from attune.fedclient.data.standardiser import missing_numbers
from attune.fedclient.model.artifact import Model
from attune.fedclient.model.light_model import in_unit
from attune.fedclient.work.blend import Member, blended_shares

FORMATS = (".onnx", ".pt2")
SCHEMA = "schema.json"  # in the file: by which a table becomes features
TOLERANCE = 1e-4  # of a probability
SAMPLES = 8  # drawn to check the file if none are given


class Portable(nn.Module):
    """From features as they lie in a shard to probabilities: preparation, every model of the blend on its frozen body, softmax.

    Of several labels the probability of each; of numbers the numbers, in their unit.

    Images (N, H, W, channels), series (N, T, channels) and tables (N, features) as float32, images of 8 bits divided by 255; a
    model that knows values for missing ones takes NaN, and the numbers that mean so; tokens (N, T) as int64. Returns (N, C), or
    (N, T, C) where every position has a label. A model to which samples are fitted takes any size, with the channels of the
    device, and answers of pixels at its own size.
    """

    mean: Tensor
    std: Tensor
    fill: Tensor
    unit: Tensor
    origin: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._images = model.info.model.kind == "images"
        self._spec, self._weights = model.info.model, weights_of(model)
        self._standard = model.standardiser is not None
        if model.standardiser is not None:
            self.register_buffer("mean", torch.tensor(model.standardiser.mean))
            self.register_buffer("std", torch.tensor(model.standardiser.std))
        words = model.info.missing_words if model.info.table_schema is None else ()
        self._gaps: list[float] = missing_numbers(model.info.model.kind, words).astype(np.float32).tolist()
        self._fills = model.standardiser is not None and model.standardiser.fill is not None
        if model.standardiser is not None and model.standardiser.fill is not None:
            self.register_buffer("fill", torch.tensor(model.standardiser.fill, dtype=torch.float32))
        self.register_buffer("unit", torch.tensor(unit_of(model), dtype=torch.float64))
        self.register_buffer(
            "origin", torch.tensor(model.info.targets.mean if model.info.targets else [0.0], dtype=torch.float64)
        )
        self._numbers = model.info.targets is not None
        body = body_of(model.trainer.network.model)
        self._body = _held(self, body.tensors if body else {})
        self.members = nn.ModuleList(_Member(member) for member in model.members.values())

    def forward(self, x: Tensor) -> Tensor:
        for number in self._gaps:
            x = torch.where(x == number, torch.nan, x)
        if self._fills:
            x = torch.where(torch.isnan(x), self.fill, x)
        if self._weights:
            x = fit_floats(x, self._spec, self._weights, torch)
        if self._standard:
            x = ((x.double() - self.mean) / self.std).float()
        if self._weights:
            x = torch.nan_to_num(x, nan=0.0)
        if self._images:
            x = x.permute(0, 3, 1, 2)
        body = {name: self.get_buffer(key) for name, key in self._body.items()}
        shares = [member(x, body) for member in self.members]
        shares_sum = torch.stack(shares).sum(dim=0)
        return (shares_sum.double() * self.unit + self.origin).float() if self._numbers else shares_sum


class _Member(nn.Module):
    """One model of the blend; its tensors are buffers, so that they go into the file."""

    def __init__(self, member: Member) -> None:
        super().__init__()
        self._member = member
        self._names = _held(self, member.tensors)

    def forward(self, x: Tensor, body: Mapping[str, Tensor]) -> Tensor:
        tensors = {**body, **{name: self.get_buffer(key) for name, key in self._names.items()}}
        trainer = self._member.trainer
        return self._member.shares_of(trainer.predictor.logits(trainer.network, tensors, x))


def _held(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Copy the tensors into buffers of the module, and return the buffers' names by tensor."""
    names = {name: f"tensor{number}" for number, name in enumerate(sorted(tensors))}
    for name, key in names.items():
        module.register_buffer(key, tensors[name].detach().clone())
    return names


def export(model: Model, out: Path, samples: npt.NDArray[Any] | None = None) -> float:
    """Write the file, run it, and return the largest difference from the original.

    The difference is one of probabilities, or of numbers in standard deviations.

    Args:
        model: The model, on the CPU.
        out: The file.
        samples: (N, ...) as in a shard, for the check; None takes drawn ones.

    Raises:
        SettingError: The ending is unknown, packages are missing, or the model cannot be exported.
        NoModel: The file computes something else; it is removed.
    """
    if out.suffix not in FORMATS:
        raise SettingError(f"{out.name} must end in {' or '.join(FORMATS)}, which says in what form it is written")
    for member in model.members.values():
        member.trainer.network.model.eval()
    x = drawn(model) if samples is None else _plain(samples, model)
    if len(x) < 2:
        raise SettingError("a file is checked on two samples at least")
    wanted = _original(model, x)
    write, run = (_write_onnx, _run_onnx) if out.suffix == ".onnx" else (_write_program, _run_program)
    with replaced(out) as beside:
        _written(write, Portable(model).eval(), torch.from_numpy(x[:2]), beside, model)
        computed = run(beside, x)
        difference = float((np.abs(computed - wanted) / unit_of(model)).max())
        if not difference <= TOLERANCE:
            raise NoModel(
                f"the exported model's outputs differ from the original's by up to {difference:.2g}, so no file was "
                "kept: use `fedclient predict`"
            )
    return difference


def weights_of(model: Model) -> list[list[float]]:
    """Return the weights by which samples of the device's channels are fitted to the model; empty: they are not."""
    spec, names = model.info.model, model.info.channels or ()
    return channel_weights(spec, (*spec.shape[:-1], len(names) or spec.shape[-1]), names)


def drawn(model: Model) -> npt.NDArray[Any]:
    """Return random samples of the form that the model takes."""
    spec, draw = model.info.model, np.random.default_rng(0)
    if weights := weights_of(model):  # of another size
        return draw.normal(size=(SAMPLES, *(size + 1 for size in spec.shape[:-1]), len(weights[0]))).astype(np.float32)
    if spec.kind == "tokens":
        return draw.integers(0, spec.vocabulary, (SAMPLES, *spec.shape), dtype=np.int64)
    x = draw.random((SAMPLES, *spec.shape))
    if model.standardiser is not None:
        x = model.standardiser.mean + (2 * x - 1) * model.standardiser.std
        if model.standardiser.fill is not None:
            x[0] = np.nan
    return x.astype(np.float32)


def _plain(x: npt.NDArray[Any], model: Model) -> npt.NDArray[Any]:
    """Return samples as the file takes them."""
    if model.info.model.kind == "tokens":
        return np.ascontiguousarray(x, dtype=np.int64)
    return np.ascontiguousarray(as_fractions(x) if model.info.model.kind == "images" else x, dtype=np.float32)


def _original(model: Model, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what the model itself predicts."""
    features = model.prepared(x)
    return in_unit(np.asarray(blended_shares(list(model.members.values()), features)), model.info.targets)


def unit_of(model: Model) -> list[float]:
    """Return the units in which outputs are compared: for numbers a standard deviation each."""
    return model.info.targets.std if model.info.targets else [1.0]


def _written(write: Callable[..., None], module: nn.Module, x: Tensor, path: Path, model: Model) -> None:
    free = range(x.dim() - 1) if model.info.model.channels is not msgspec.UNSET else [0]  # the axes of any size
    axes = dict.fromkeys(free, torch.export.Dim.DYNAMIC)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters warn of their own code
            write(module, x, path, model.info.table_schema, axes)
    except ImportError as error:
        raise SettingError(f"this needs {error.name}, which is not installed: pip install 'attune-fl[export]'") from None
    except OSError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SettingError(
            f"the model of {model.info.name} ({model.info.title}) cannot be exported: {first}. Use `fedclient predict`"
        ) from error


def _write_program(module: nn.Module, x: Tensor, path: Path, schema: Schema | None, axes: Mapping[int, Any]) -> None:
    program = torch.export.export(module, (x,), dynamic_shapes=(axes,))
    files = {} if schema is None else {SCHEMA: schema.to_json().decode()}
    torch.export.save(program, str(path), extra_files=files)


def _run_program(path: Path, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with torch.no_grad():
        return np.asarray(torch.export.load(str(path)).module()(torch.from_numpy(x)))


def _write_onnx(module: nn.Module, x: Tensor, path: Path, schema: Schema | None, axes: Mapping[int, Any]) -> None:
    import onnxruntime  # noqa: F401 - without it the file could not be checked

    torch.onnx.export(
        module, (x,), str(path), input_names=["x"], output_names=["probabilities"], dynamo=True, external_data=False,
        dynamic_shapes=(axes,), verbose=False,
    )  # fmt: skip
    if schema is not None:
        import onnx

        written = onnx.load(str(path))
        onnx.helper.set_model_props(written, {SCHEMA: schema.to_json().decode()})
        onnx.save(written, str(path))


def _run_onnx(path: Path, x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])
