"""A model as a function of its tensors, with a view of what enters its head, and the draws of its dropout.

B samples, D the head's inputs, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from attune.common.errors import SettingError
from attune.common.models.body import names_of, training_mode
from attune.common.models.output import logits_of
from attune.common.models.structure import roles, tensors_of
from attune.common.torch_state import drawing, may_draw

_ONE_SAMPLE = "more than 1 value per channel"  # in torch's message


class Network:
    """The architecture alone: every call is given the tensors to compute with, under the model's own names or more.

    Args:
        model: The module.
        vocabulary: Number of tokens; 0 if it does not take tokens, or not known.
    """

    def __init__(self, model: nn.Module, vocabulary: int = 0) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.names = frozenset(tensors_of(model))
        self.still = names_of(model)  # its frozen body
        self.parameters = frozenset(name for name, _ in model.named_parameters())
        self._draws = may_draw(model)
        self.trainable = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)

    def __repr__(self) -> str:
        return f"Network({type(self.model).__name__}, {len(self.names)} tensors)"

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return logits (B, ..., C). In training mode running statistics among `tensors` are updated in place.

        A frozen body need not be among them: then the model's own is used.
        """
        model_tensors = {name: tensor for name, tensor in tensors.items() if name in self.names or name in self.still}
        try:
            # A copy: a model may change its input in place, and it must not change the samples.
            with drawing(self._draws):
                output = functional_call(self.model, model_tensors, (x.clone(),))
        except ValueError as error:
            if _ONE_SAMPLE not in str(error):
                raise
            raise SettingError(
                "a batch of one sample cannot pass a batch normalisation: set train.batch_size to 2 or more. A device with a "
                "single training sample cannot train this model"
            ) from error
        return logits_of(output, self.model)

    def train(self, still: Callable[[str], bool]) -> None:
        """Switch to training mode, except for normalisation layers with statistics in `still`, which normalise with these."""
        training_mode(self.model)
        for name in sorted(self.names - self.parameters):
            if "norm" in self.roles[name] and still(name):
                self.model.get_submodule(name.rpartition(".")[0]).training = False

    @cached_property
    def normalises_batches(self) -> bool:
        """Whether a layer normalises by the samples of a batch, so that training needs two of them."""
        return any(isinstance(module, _BatchNorm) for module in self.model.modules())

    def with_features(self, tensors: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits (B, ..., C), features (B, ..., D)). Features are what enters the head.

        Raises:
            SettingError: The model computes its logits without calling the head's module.
        """
        seen: list[Tensor] = []
        handle = self.model.get_submodule(self.head).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self(tensors, x)
        finally:
            handle.remove()
        if not seen:
            raise SettingError(f"the model {type(self.model).__name__} never calls its head {self.head!r}: take another method")
        return logits, seen[-1]

    @cached_property
    def roles(self) -> dict[str, frozenset[str]]:
        """Roles of each tensor, as in common.models.structure."""
        return roles(self.model)

    @cached_property
    def head(self) -> str:
        """Path of the classifier head, a Linear.

        Raises:
            SettingError: The model has none.
        """
        for name, of in self.roles.items():
            if "head" in of:
                return name.rpartition(".")[0]
        raise SettingError(f"the model {type(self.model).__name__} has no linear head: choose another model or method")
