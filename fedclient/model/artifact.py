"""The finished model: files that need neither server nor federation to predict.

model/model.safetensors holds the tensors; model/model.json what they are, how features are prepared and what classes mean. Of
a blend, model.safetensors is the network with the largest weight, and each of the other models has a file of its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attune.common.errors import NoModel, ShardError, WireError
from attune.common.hardware import choose
from attune.common.methods.registry import configured_from
from attune.common.methods.settings.objectives import ModelSettings
from attune.common.metrics import NETWORKS
from attune.common.models.registry import build, size_bytes
from attune.common.models.structure import tensors_of
from attune.common.plugins import check_installed, check_model_allowed
from attune.common.wire.files import read_tensors
from attune.fedclient.data.shard import Shard
from attune.fedclient.model.light_model import FinishedModel
from attune.fedclient.model.model_info import ModelInfo, file_of, finished_model, read_info, save, weights_of
from attune.fedclient.work.blend import Member, answers_of, blended_shares
from attune.fedclient.work.build import objective_for, predictor_for
from attune.fedclient.work.measures import mean_score
from attune.fedclient.work.objectives.base import Network, Tensors
from attune.fedclient.work.orders import ROWS
from attune.fedclient.work.portfolio.portfolio import reader_of, trainer_of
from attune.fedclient.work.predictors.base import PlainPredictor
from attune.fedclient.work.task_measures import measure_for
from attune.fedclient.work.trainer import EVALUATION_BATCH, Trainer

__all__ = ["Model", "finished_model", "read_info", "save"]
SMALL_BYTES = 64 << 20  # of a model: what a description may declare beyond its files


def _tensors_in(path: Path, info: ModelInfo) -> Tensors:
    """Read the tensors of a finished model.

    Raises:
        NoModel: The file is missing or damaged.
    """
    try:
        # Homes of older versions have no digests.
        return read_tensors(path, digest=info.files.get(path.name))
    except (OSError, WireError) as error:
        raise NoModel(f"{error}: start fedclient again to fetch the model") from None


def _check_size(info: ModelInfo, folder: Path) -> None:
    """Check that the files can hold the model before memory is taken for it. Frozen bodies of user code are not in the files.

    Holes of a file hold nothing, so the blocks of the disk count. The factor allows for disks that compress.

    Raises:
        NoModel: The description is of a larger model, or a file is missing.
    """
    try:
        facts = [(folder / file_of(name, info)).stat() for name in weights_of(info)]
    except OSError as error:
        raise NoModel(f"{error}: start fedclient again to fetch the model") from None
    stored = sum(min(file.st_size, 512 * getattr(file, "st_blocks", file.st_size)) for file in facts)
    declared = max(sum(file.st_size for file in facts), 0 if ":" in info.model.name else size_bytes(info.model))
    if declared > 4 * stored + SMALL_BYTES:
        raise NoModel(f"the model in {folder} has {declared:,} bytes by its description, and its files hold {stored:,}")


class Model(FinishedModel):
    """Finished model, ready to predict.

    Args:
        info: Its description.
        tensors: The tensors of each of its models, as `save` took them.

    Raises:
        SettingError: It cannot be built here.
    """

    def __init__(self, info: ModelInfo, tensors: Mapping[str, Mapping[str, Tensor]], device: str = "cpu") -> None:
        super().__init__(info)
        check_installed(info.plugins or {})
        configured = configured_from({**info.method_options, "name": info.method}, returns={})
        self.measure = measure_for(info.model, "dice" if info.model.labels_pixels else info.task)
        network, where = build(info.model, info.seed), choose(device)
        read = reader_of(Network(network.to(where)), tensors_of(network))  # nothing changes the network's own tensors

        def member(name: str, weight: float) -> Member:
            if name not in NETWORKS:
                outputs = info.model.classes
                trainer = trainer_of(name, dict(tensors[name]), info.task, outputs, where, read)
                return Member(weight, trainer, dict(tensors[name]), info.sharpness.get(name, 1.0))
            predictor = predictor_for(configured) if name == info.own_choice else PlainPredictor(ModelSettings())
            trainer = Trainer(network, objective_for(configured), predictor, info.train, where, measure=self.measure)
            return Member(weight, trainer, dict(tensors[name]), info.sharpness.get(name, 1.0))

        self.members = {name: member(name, weight) for name, weight in weights_of(info).items()}
        # The network of pictures and exports.
        self.trainer, self.tensors = self.members[info.main].trainer, self.members[info.main].tensors

    @classmethod
    def load(cls, folder: Path, device: str = "cpu", allow_models: Collection[str] = ()) -> Model:
        """Load the model in a folder.

        Args:
            folder: Folder of a finished model.
            device: Torch device that computes.
            allow_models: Model code (`module:factory`) that may run here. A folder cannot allow its own.

        Raises:
            NoModel: `folder` holds none, or a damaged one: it cannot predict one sample.
            SettingError: The model is code that is not in `allow_models`, or cannot be built here.
        """
        info = read_info(folder)
        check_model_allowed(info.model.name, allow_models, f"the model in {folder}")
        _check_size(info, folder)
        try:
            model = cls(info, {name: _tensors_in(folder / file_of(name, info), info) for name in weights_of(info)}, device)
            if ":" not in info.model.name:
                answers_of(list(model.members.values()), model.prepared(np.zeros((1, *info.model.shape), np.int64)))
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise NoModel(f"the tensors of the model in {folder} do not fit its description ({error})") from error
        return model

    def without_samples(self) -> Model:
        """Return the model without fitted models that hold training samples; the weights of the others sum to 1 again.

        Raises:
            NoModel: It has no others.
        """
        held = {name for name, member in self.members.items() if ROWS in member.tensors}
        left = {name: member for name, member in self.members.items() if name not in held}
        if not left:
            raise NoModel(f"the model of {self.info.name} is made of its training samples alone: export it --with-samples")
        total = sum(member.weight for member in left.values())
        weights = {name: member.weight / total for name, member in left.items()}
        info = msgspec.structs.replace(
            self.info,
            weights=weights,
            kept=self.info.kept if self.info.kept in left else self.info.main,
            contains_samples=[name for name in self.info.contains_samples if name not in held],
        )
        return Model(info, {name: member.tensors for name, member in left.items()}, str(self.trainer.device))

    def __repr__(self) -> str:
        return f"<Model of {self.info.name}, {self.info.method}, accuracy {self.info.accuracy}>"

    def right(self, shard: Shard) -> Tensor:
        """Return which labels of the test part it predicts, (N,) or (N, T) bool; in other tasks scores (N,), or a C-index (1,).

        Raises:
            UndeclaredLabels: The test part has unknown labels.
            ShardError: There is no test part, or it has no score.
            AttuneError: As in `predict`.
        """
        features, y = self.test_part(shard)
        return self.measure.right(torch.from_numpy(self.answers_of(features)), torch.from_numpy(y))

    def evaluate(self, shard: Shard) -> tuple[float, int]:
        return mean_score(self.right(shard)), len(shard.test_x)

    def test_part(self, shard: Shard) -> tuple[Any, npt.NDArray[Any]]:
        features, y = super().test_part(shard)
        if not self.measure.can_score(torch.from_numpy(y)):
            raise ShardError(
                f"the test samples of shard {shard.path} have no C-index: none had its event before the time of another one"
            )
        return features, y

    def answers_of(self, features: Tensor) -> npt.NDArray[Any]:
        torch.set_num_threads(1)
        return np.asarray(answers_of(list(self.members.values()), features))

    def shares_of(self, features: Tensor) -> npt.NDArray[np.float32]:
        torch.set_num_threads(1)
        members = list(self.members.values())
        return np.concatenate([blended_shares(members, some).cpu().numpy() for some in features.split(EVALUATION_BATCH)])
