"""A device in secure aggregation: with whose certificates it signs, and that what it has kept decides what it answers."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from attune.common.config import TrainSettings
from attune.common.errors import HomeMismatch, LimitExceeded, SettingError, UpdateRefused
from attune.common.exchange.messages import SecureMessage
from attune.common.exchange.registry import SecureSumSettings
from attune.common.plan import ModelSpec, Plan
from attune.common.protocol import SAMPLES_BEFORE
from attune.fedclient.address import ServerAddress
from attune.fedclient.exchanges import Exchanges, _kept, _trained, signer_of
from attune.fedclient.gate import PrivacyLimits
from attune.fedclient.home import Identity
from attune.fedclient.messages import OrderResult, Part
from attune.fedclient.options import DeviceOptions
from attune.fedclient.secure_member import MaskableOrder, MemberState, Participant
from attune.fedclient.session import Session
from attune.fedclient.sum_book import OF_SAMPLES, SumBook
from attune.fedclient.work.state import FolderOrders
from tests.common.secure.cohort import Authority, credential_of, the_authority

AT_THE_SERVER = Identity("ada", credential_of("ada"), the_authority().pem)


def options(authority: Path | None = None, signer: Path | None = None) -> DeviceOptions:
    return DeviceOptions(Path("shard"), ServerAddress("localhost", 1), authority=authority, signer=signer)


@pytest.fixture
def org(tmp_path: Path) -> Authority:
    """Return another authority, with its certificate in org.pem, and certificates of ada and bo."""
    authority = Authority()
    (tmp_path / "org.pem").write_bytes(authority.pem)
    for name in ("ada", "bo"):
        credential = authority.credential(name)
        (tmp_path / f"{name}.pem").write_bytes(credential.key_pem + credential.certificate_pem)
    return authority


def test_without_options_a_device_signs_with_its_certificate_of_the_federation() -> None:
    assert signer_of(options(), AT_THE_SERVER) == AT_THE_SERVER


def test_with_an_authority_of_its_own_it_signs_with_that_ones_certificate(org: Authority, tmp_path: Path) -> None:
    signer = signer_of(options(tmp_path / "org.pem", tmp_path / "ada.pem"), AT_THE_SERVER)
    assert (signer.name, signer.ca_pem) == ("ada", org.pem)
    assert signer.credential.issued_by(org.pem)


WRONG = {
    "no signer": ("org.pem", None, "belong together"),
    "no authority": (None, "ada.pem", "belong together"),
    "another name": ("org.pem", "bo.pem", "in the name ada"),
    "no key": ("org.pem", "org.pem", "must hold a P-256 key"),
    "a certificate of another authority": ("server.pem", "ada.pem", "has issued"),
    "no file": ("gone.pem", "ada.pem", "cannot read"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_options_that_do_not_fit_are_told(wrong: str, org: Authority, tmp_path: Path) -> None:
    (tmp_path / "server.pem").write_bytes(the_authority().pem)
    authority, signer, said = WRONG[wrong]
    given = options(*(tmp_path / name if name else None for name in (authority, signer)))
    with pytest.raises(SettingError, match=said):
        signer_of(given, AT_THE_SERVER)


def test_a_device_may_demand_sums_of_many_devices() -> None:
    spec = ModelSpec("mlr", "tabular", (3,), 2)
    single = Plan("fed", 0, spec, [0, 1], "fedavg", {}, TrainSettings())
    summed = replace(single, transforms={"secure-sum-4": {"devices": 5}})
    for plan, demanded in ((single, 0), (summed, 0), (summed, 5)):
        PrivacyLimits(devices=demanded).check_plan(plan, 60)
    for plan, demanded, least in ((single, 3, 1), (summed, 6, 5)):
        with pytest.raises(LimitExceeded, match=rf"reads sums of {least} updates.*at least {demanded} \(--min-devices\)"):
            PrivacyLimits(devices=demanded).check_plan(plan, 60)


def test_what_is_kept_comes_back_as_it_was(tmp_path: Path) -> None:
    orders = FolderOrders(tmp_path / "orders", "ada")
    assert _kept(orders) == MemberState()
    member = Participant("ada", credential_of("ada"), the_authority().pem, "fed", "", 3)
    trained = MaskableOrder("train-1-ada", 1, "digest")
    state, _ = member.answer(MemberState(), SecureMessage("train-1-ada", 1, "keys"), trained)
    (tmp_path / "orders").mkdir()
    orders.keep_secure_state(msgspec.json.encode(state))
    assert _kept(FolderOrders(tmp_path / "orders", "ada")) == state
    assert (tmp_path / "orders" / "secure.json").stat().st_mode & 0o077 == 0, "it has secrets"


def test_a_damaged_record_ends_the_device(tmp_path: Path) -> None:
    (tmp_path / "secure.json").write_text("{")
    with pytest.raises(HomeMismatch, match=r"secure\.json in .* is damaged"):
        _kept(FolderOrders(tmp_path, "ada"))


def test_before_a_plan_no_message_is_answered() -> None:
    assert Session().on(SecureMessage("train-1-ada", 1, "keys")) == []


def test_sums_over_samples_follow_from_nothing_that_is_served() -> None:
    """So a server that serves another start gets no second sum of them."""
    first = OrderResult(
        order_id="train-1-ada", round=1, trained=True, samples=60, of_samples=True, served={"attended": "sha256:2"},
        parts=(Part("attended", "sha256:1", 8),),
    )  # fmt: skip
    later = replace(first, order_id="train-9-ada", round=9, served={"attended": "sha256:3"})
    starts = {_trained(result, SumBook()).start for result in (first, later)}
    assert starts == {f"{OF_SAMPLES}attended=sha256:1"}
    errors = [_trained(replace(result, of_samples=False), SumBook()).start for result in (first, later)]
    assert len({*errors, *starts}) == 3


def test_sums_beside_an_update_are_in_one_sum_and_change_nothing_of_its_own_rule() -> None:
    """From the start of round 1 there is no second sum of updates, with sums over samples or without."""
    parts = (Part("shared", "sha256:1", 8), Part("solved", "sha256:2", 8))
    first = OrderResult(order_id="train-1-ada", round=1, trained=True, samples=60, served={"shared": "sha256:3"}, parts=parts)
    both, alone = _trained(first, SumBook()), _trained(replace(first, parts=parts[:1]), SumBook())
    assert both.start == alone.start and alone.starts == (alone.start,)
    assert both.starts == (alone.start, f"{OF_SAMPLES}sha256:2")
    book = SumBook().noting(both.starts[0], "abcde", same_cohort=False).noting(both.starts[1], "abcde", same_cohort=False)
    again = _trained(replace(first, order_id="train-9-ada", round=9, served={"shared": "sha256:4"}), book)
    assert [book.refuses(start, "abcdf", same_cohort=False) for start in again.starts] == ["", SAMPLES_BEFORE]


@pytest.mark.parametrize(("exact", "least"), [(False, 3), (True, 5)])
def test_sums_over_samples_have_five_devices_whatever_the_plan_says(exact: bool, least: int) -> None:
    spec = ModelSpec("dnn", "tabular", (4,), 2, 0, {})
    plan = Plan("fed", 0, spec, [0, 1], "analytic", {}, TrainSettings())
    settings = SecureSumSettings(devices=3, exact=exact)
    member = Exchanges(plan, settings, lambda: AT_THE_SERVER, *[cast(Any, None)] * 4)._member()
    member._check_number(least, 2)
    with pytest.raises(UpdateRefused, match=rf"a sum over {least - 1} devices .* at least {least}"):
        member._check_number(least - 1, 2)
