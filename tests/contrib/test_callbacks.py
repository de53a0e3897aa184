"""Other libraries' loops inside `train`: the method's term reaches their steps, and progress is reported.

These tests are skipped without the libraries.
"""

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import attune
from tests.fedclient.work.test_own_loop import shards

MU, RATE = 4.0, 0.1


def by_hand(model: Any, data: Any, context: Any) -> None:
    """Take three steps on all samples, with the method's term."""
    optimizer = torch.optim.SGD(context.parameters(), lr=RATE)
    for _ in range(3):
        optimizer.zero_grad()
        (cross_entropy(model(data.x), data.y) + context.penalty()).backward()
        optimizer.step()


def run(train: Any) -> Any:
    return attune.simulate(shards(), "fedprox", "mlr", rounds=2, train=train, settings={"method.mu": MU})


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.model("kiel").tensors.items(), other.model("kiel").tensors.values(), strict=True)
    return all(torch.allclose(tensor, theirs, atol=1e-6) for (_, tensor), theirs in pairs)


def test_lightning_takes_the_same_steps() -> None:
    lightning = pytest.importorskip("lightning")
    from attune.contrib.callbacks import lightning_callback

    class Module(lightning.LightningModule):
        def __init__(self, model: Any, context: Any) -> None:
            super().__init__()
            self.model, self.context = model, context

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.context.parameters(), lr=RATE)

    def train(model: Any, data: Any, context: Any) -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", callbacks=[lightning_callback(context)], **quiet)
        trainer.fit(Module(model, context), data.batches(len(data), shuffle=False))

    assert same(run(train), run(by_hand))


def test_hugging_faces_trainer_takes_the_same_steps(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from attune.contrib.callbacks import hugging_face_callback

    class Losing(torch.nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            return {"loss": cross_entropy(self.model(x), labels)}

    def train(model: Any, data: Any, context: Any) -> float:
        rows = [{"x": x, "labels": y} for x, y in data.dataset]
        given = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=len(data), learning_rate=RATE, use_cpu=True,
            lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, report_to=[], save_strategy="no", disable_tqdm=True,
            remove_unused_columns=False, weight_decay=0.0,
        )  # fmt: skip
        return (
            transformers.Trainer(Losing(model), given, train_dataset=rows, callbacks=[hugging_face_callback(context)])
            .train()
            .training_loss
        )

    assert same(run(train), run(by_hand))
