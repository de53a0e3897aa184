"""Parts handed in with loss: asked for, checked, and aggregated in the dtypes of the part."""

from __future__ import annotations

import pytest
import torch

from attune.common.errors import SettingError, UpdateRefused
from attune.common.protocol import ENCODINGS
from attune.common.wire.encodings import encode
from attune.fedserver.core.records import Entry, Row
from attune.fedserver.rpc.messages import encode as message_of
from tests.server.bench import Bench, plan
from tests.server.conftest import World
from tests.server.test_coordinator import PROFILE, Server, next_order, process
from tests.server.test_inline import update, updates_of

SETTINGS = {
    "method": {"name": "fedavg"},
    "model": {"name": "mlr"},
    "round": {"rounds": 2, "min_clients": 2, "encoding": "bf16"},
}


def test_a_device_that_cannot_write_it_is_refused(world: World) -> None:
    async def scenario(server: Server) -> None:
        with pytest.raises(SettingError, match=r"a cannot write parts as bf16 .*update fedclient"):
            server.members.connect("a", PROFILE, "an older device")

    process(world, scenario, SETTINGS)


def test_the_order_asks_for_it_and_an_update_in_another_encoding_is_refused(world: World) -> None:
    async def scenario(server: Server) -> None:
        streams = [server.members.connect(name, PROFILE, "test", 1 << 20, ENCODINGS) for name in ("a", "b")]
        order, _ = [await next_order(stream) for stream in streams]
        assert [(each.part, each.encoding) for each in message_of(order).order.returns] == [("shared", "bf16")]
        with pytest.raises(UpdateRefused, match="in another encoding than its order asks for"):
            await updates_of(server).submit("a", update(order, order.downloads[0].data))

    process(world, scenario, SETTINGS)


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "fedtp"])
def test_the_next_state_is_that_of_the_decoded_updates(tmp_path, method: str) -> None:
    """What is aggregated are float32 tensors with the values of the bfloat16 ones; and the state stays float32."""
    states = []
    for encoding in ("bf16", ""):
        tiny = Bench(tmp_path / (encoding or "full"), plan(method, "vit"))
        tiny.engine.serve(["a", "b"])
        generator = torch.Generator().manual_seed(7)
        entries = {}
        for client in ("a", "b"):
            parts = {}
            for part, manifest in sorted(tiny.engine.manifests.items()):
                exact = {name: torch.randn(spec.shape, generator=generator) for name, spec in manifest.items()}
                written = encode(exact, "bf16")
                if not encoding:
                    written = {name: tensor.float() for name, tensor in written.items()}
                parts[part] = tiny.write(f"inbox/{client}/{part}", written)
                tiny.engine.check(client, part, parts[part], 1e9)
            entries[client] = Entry(Row(round=1, work="train", client=client, samples=3), parts)
        outcome = tiny.engine.aggregate(entries)
        states.append([(slot.part, slot.key, slot.digest) for slot in outcome.slots])
    assert states[0] == states[1]
