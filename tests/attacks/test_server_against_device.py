"""A server that asks too much of a device, or deceives it: the device's owner sets limits, and certificates are checked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attune.common.errors import CertificateRefused, LimitExceeded
from attune.common.identity.credential import Credential
from attune.common.pb import federation_pb2 as pb
from attune.common.plan import Plan
from attune.fedclient.limits import OrderLimits, epochs_of
from attune.fedserver.identity.authority import Authority
from tests.fedclient.conftest import Bench, FakeServer, make_bench, shard
from tests.fedserver.bench import plan

Make = Callable[..., Bench]


__all__ = ["make_bench", "shard"]  # fixtures


@pytest.fixture
def make(make_bench: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return make_bench


def nothing_was_done(bench: Bench) -> bool:
    return not bench.server.seen.submits and not (bench.folder / "home" / "plan.json").exists()


def test_a_plan_that_trains_for_ever_is_refused(make: Make) -> None:
    bench = make()
    bench.server.train = msgspec.structs.replace(bench.server.train, local_epochs=1 << 40)
    with pytest.raises(LimitExceeded, match="--max-epochs"):
        bench.run()
    assert nothing_was_done(bench)


def test_a_plan_with_a_model_that_fills_the_memory_is_refused_before_it_is_built(make: Make) -> None:
    """Send a plan with a model of 10^12 numbers, of which nothing is ever in memory."""
    bench = make(model="dnn")
    real = bench.server._make_plan

    def with_a_huge_model(profile: Any) -> None:
        real(profile)
        assert bench.server.plan is not None
        huge = msgspec.structs.replace(bench.server.plan.model, options={"hidden": [1_000_000, 1_000_000]})
        bench.server.plan = msgspec.structs.replace(bench.server.plan, model=huge)

    bench.server._make_plan = with_a_huge_model
    with pytest.raises(LimitExceeded, match="--max-model-bytes"):
        bench.run()
    assert nothing_was_done(bench)


def test_an_order_without_an_end_is_given_up_after_the_device_s_own_time(make: Make) -> None:
    bench = make()
    bench.server.train = msgspec.structs.replace(bench.server.train, local_epochs=1000)
    bench.server.deadline_s = 1e12
    bench.server.works, bench.server.rounds = ["train"], [1]
    bench.run_until(lambda: bool(bench.server.seen.troubles), limits=OrderLimits(order_s=0.01))
    assert "the deadline passed" in bench.server.seen.troubles[0].reason
    assert not bench.server.seen.submits


def test_orders_without_number_end_where_the_device_says(make: Make) -> None:
    bench = make()
    bench.server.works, bench.server.rounds = ["train"] * 50, list(range(1, 51))
    with pytest.raises(LimitExceeded, match="--max-orders"):
        bench.run(limits=OrderLimits(orders=3))
    assert len({update.order_id for update in bench.server.seen.submits}) == 3


class InAnotherName(FakeServer):
    """Authority that certifies every device as another one, and says so or not."""

    said = "mallory"

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.Certificate:
        right = await super().Enrol(request, context)
        pem = self.authority.issue_device(request.csr_der, "mallory", 1.0)
        return pb.Certificate(certificate_pem=pem, ca_pem=right.ca_pem, name=self.said or right.name)


class Silently(InAnotherName):
    said = ""


@pytest.mark.parametrize("kind", [InAnotherName, Silently])
def test_a_certificate_in_another_name_is_refused(make: Make, kind: type[FakeServer]) -> None:
    bench = make(kind)
    with pytest.raises(CertificateRefused, match="in the name of mallory, not of kiel"):
        bench.run()
    assert not (bench.folder / "home" / "identity" / "device.pem").exists()


class Renews(FakeServer):
    """Authority whose first certificate is right, and whose renewed one is not."""

    wrong: Callable[[FakeServer, bytes], bytes]

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.Certificate:
        right = await super().Renew(request, context)
        return pb.Certificate(certificate_pem=type(self).wrong(self, request.csr_der), ca_pem=right.ca_pem, name=right.name)


class AsMallory(Renews):
    wrong = staticmethod(lambda server, csr: server.authority.issue_device(csr, "mallory", 1.0))


class OfAnotherAuthority(Renews):
    wrong = staticmethod(lambda server, csr: Authority.create(server.folder / "other").issue_device(csr, "kiel", 1.0))


@pytest.mark.parametrize(("kind", "said"), [(AsMallory, "in the name of mallory"), (OfAnotherAuthority, "did not sign")])
def test_a_renewed_certificate_that_is_wrong_is_not_kept(make: Make, kind: type[FakeServer], said: str, monkeypatch) -> None:
    bench = make(kind)
    bench.run_until(lambda: bool(bench.server.seen.submits))
    before = Credential.load(bench.folder / "home" / "identity").certificate_pem
    monkeypatch.setattr("attune.fedclient.link.grpc_link.needs_renewal", lambda pem, now: True)
    bench.run_until(lambda: any(said in line for line in bench.lines.lines), token=None)
    assert Credential.load(bench.folder / "home" / "identity").certificate_pem == before


def planned(**train: Any) -> Plan:
    found = plan()
    return msgspec.structs.replace(found, train=msgspec.structs.replace(found.train, **train))


def test_passes_are_counted_as_they_are_trained() -> None:
    assert epochs_of(planned(local_epochs=7), 100) == 7
    assert epochs_of(planned(local_steps=20, batch_size=20), 100) == 4
    assert epochs_of(planned(local_steps=20, batch_size=20), 1) == 20
    rep = msgspec.structs.replace(planned(local_epochs=2), method="fedrep", method_options={"head_epochs": 5, "body_epochs": 1})
    assert epochs_of(rep, 100) == 8
    pfedme = msgspec.structs.replace(planned(local_epochs=2), method="pfedme", method_options={"inner_steps": 5})
    assert epochs_of(pfedme, 100) == 10
    tuned = planned(local_epochs=2, batch_size=20)
    tuned = msgspec.structs.replace(tuned, method="fedavg+ft", method_options={"tune_steps": 1_000_000})
    assert epochs_of(tuned, 100) == 2 + 200_000
