"""Construction of a method's working objects on real models."""

import pytest
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.method import assign, configure
from attune.common.methods.registry import get
from attune.common.models.structure import tensors_of
from attune.fedserver.lab.aggregators.attention import Mcsa
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork
from attune.fedserver.lab.aggregators.mean import Mean
from attune.fedserver.lab.build import aggregators_for
from tests.common.methods.rows import OF_ANY_MODEL


@pytest.mark.parametrize("name", [name for name in OF_ANY_MODEL if name != "local"])
def test_every_method_plays_two_rounds_on_a_real_model(name, models):
    """Check that every tensor of a part comes back with the model's shape and dtype, and changed by training."""
    model, method = models["vit"](), get(name)
    kinds, initial = assign(method, model), tensors_of(model)
    vaults = {kind: MemoryVault() for kind in set(kinds.values())}
    options = {"hidden": 8} if "fedtp" in name else {}
    aggregators = aggregators_for(configure(method, options), model, vaults.__getitem__, seed=1)
    settings = configure(method, options).aggregators
    assert set(aggregators) == set(kinds.values()) - {"private"}
    for kind, aggregator in aggregators.items():
        own = {tensor: initial[tensor] for tensor in initial if kinds[tensor] == kind}
        aggregator.start(own)
        changed = own
        for number in range(2):
            step = 0.01 * (number + 1)
            aggregator.admit("a")
            aggregator.close_round(
                [
                    PartUpdate(
                        client,
                        m,
                        {
                            n: t * 0 + step * m if settings[kind].returns == "change" else changed[n] + step * m
                            for n, t in own.items()
                        },
                    )
                    for client, m in (("a", 1), ("b", 3))
                ]
            )
            slot = aggregator.slot("a")
            changed = dict(vaults[kind].read(slot)) if slot else dict(aggregator.generate(["a"]))["a"]
            assert {n: (t.shape, t.dtype) for n, t in changed.items()} == {n: (t.shape, t.dtype) for n, t in own.items()}
        assert all(not torch.equal(changed[n], own[n]) for n in own)


def test_kinds_get_their_aggregators(models):
    built = aggregators_for(configure(get("fedtp+mcsa"), {}), models["vit"](), lambda kind: MemoryVault(), seed=0)
    assert isinstance(built["generated"], Hypernetwork) and isinstance(built["attended"], Mcsa)
    built = aggregators_for(configure(get("fedavg"), {}), models["dnn"](), lambda kind: MemoryVault(), seed=0)
    assert isinstance(built["shared"], Mean)
    assert aggregators_for(configure(get("local"), {}), models["dnn"](), lambda kind: MemoryVault(), seed=0) == {}
