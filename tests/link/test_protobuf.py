"""What a device makes of a server's message that says more, or other things, than it should."""

from __future__ import annotations

from attune.common.pb import federation_pb2 as pb
from attune.fedclient.link.protobuf import event_of
from attune.fedclient.messages import Ordered


def test_of_what_others_found_only_shares_of_known_models_are_heard() -> None:
    said = {"personalized": float("nan"), "common": 0.4, "local": -1.0, "theirs": 0.3}
    order = pb.Order(id="evaluate-1-a", round=1, work=pb.WORK_EVALUATE, prior=said)
    heard = event_of(pb.ServerMessage(order=order))
    assert isinstance(heard, Ordered) and heard.order.prior == {"common": 0.4}
    order.prior["common"] = float("inf")
    heard = event_of(pb.ServerMessage(order=order))
    assert isinstance(heard, Ordered) and heard.order.prior == {}
