"""The privacy guarantee in model.json: a model has the guarantee only if it follows from the samples through noise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from attune.common.plan import Profile
from attune.fedclient.messages import OrderResult
from attune.fedclient.model.model_guarantee import guarantee_of
from attune.fedserver.core.planning import make_plan, resolve

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
