"""Decisions about trust in the audit log: after a start the ledger has them again, whatever it has lost."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused, HomeMismatch
from attune.common.identity.credential import csr_der, fingerprint_of, new_key
from attune.common.identity.token import JoinToken
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.identity.trust import CUT, LOST_ENROLMENT, REPAIRED, differences_in, settle
from attune.fedserver.ports.ledger import AuditHead, Certificate
from attune.fedserver.stores.disk import DiskStorage

DATABASE = "state.sqlite"


class Place:
    """A server's storage that loses what its database was told since `remember`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.create(folder / "ca")
        self.open()
        self.token = aio.run(self.admin.new_token(self.authority.public_key_compressed, uses=5))
        self.holder = fingerprint_of(JoinToken.parse(self.token).bootstrap().certificate_pem)

    def open(self) -> None:
        self.storage = DiskStorage(self.folder)
        self.admin = FederationAdmin(self.storage.ledger, "a test")
        self.registrar = Registrar(self.authority, self.storage.ledger, 90.0)

    def enrol(self, name: str) -> str:
        return fingerprint_of(aio.run(self.registrar.enrol(self.holder, name, csr_der(new_key(), name))))

    def give_away(self, name: str) -> str:
        """Enrol another device by the name of one that was revoked."""
        token = JoinToken.parse(aio.run(self.admin.new_token(self.authority.public_key_compressed, only_for=name)))
        self.holder = fingerprint_of(token.bootstrap().certificate_pem)
        return self.enrol(name)

    def remember(self) -> None:
        aio.run(self.storage.close())  # so that the file itself has everything
        shutil.copy(self.folder / DATABASE, self.folder / "before")
        self.open()

    def lose_power(self) -> None:
        aio.run(self.storage.close())
        shutil.copy(self.folder / "before", self.folder / DATABASE)
        self.open()

    def lines(self) -> list[str]:
        with closing(self.storage.reader()) as reader:
            return differences_in(reader).lines

    def settle(self) -> list[str]:
        return aio.run(settle(self.storage))

    def devices(self) -> dict[str, DeviceRecord]:
        return {device.name: device for device in aio.run(self.storage.ledger.devices())}

    def certificates(self) -> list[Certificate]:
        return aio.run(self.storage.ledger.certificates())

    def events(self) -> list[str]:
        with closing(self.storage.reader()) as reader:
            return [entry.event for entry, _ in reader.audit()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.enrol("kiel")
    made.remember()
    return made


def test_a_ledger_that_lost_nothing_has_no_difference(place: Place) -> None:
    place.enrol("bonn")
    aio.run(place.admin.revoke("bonn"))
    before = place.events()
    assert place.lines() == place.settle() == []
    assert place.events() == before


def test_all_kinds_of_decisions_are_applied_again(place: Place) -> None:
    second = place.enrol("bonn")
    place.enrol("eve")
    renewed = fingerprint_of(aio.run(place.registrar.renew("kiel", csr_der(new_key(), "kiel"))))
    aio.run(place.admin.revoke("eve"))
    aio.run(place.admin.revoke_token(JoinToken.parse(place.token).label))
    aio.run(place.admin.pause_record(True))
    expected = place.devices(), place.certificates()
    place.lose_power()
    assert list(place.devices()) == ["kiel"]
    named = place.lines()
    assert place.lines() == named, "a comparison changes nothing"
    assert place.settle() == named and len(named) == 6, named
    devices, certificates = place.devices(), place.certificates()
    assert {name: (one.public_key, one.revoked, one.token) for name, one in devices.items()} == {
        name: (one.public_key, one.revoked, one.token) for name, one in expected[0].items()
    }
    assert [(one.fingerprint, one.not_after, one.public_key, one.revoked) for one in certificates] == [
        (one.fingerprint, one.not_after, one.public_key, one.revoked) for one in expected[1]
    ]
    assert {second, renewed} <= {one.fingerprint for one in certificates}
    [token] = aio.run(place.storage.ledger.tokens())
    assert token.uses_left == 2 and token.withdrawn_at is not None
    assert aio.run(place.storage.ledger.snapshot()).record.paused
    assert place.lines() == []
    assert place.events()[-1] == REPAIRED


def test_an_older_home_that_lost_a_revocation_has_it_again(place: Place) -> None:
    aio.run(place.admin.revoke("kiel"))
    place.lose_power()
    with place.storage.ledger._tables._db.transaction():
        place.storage.ledger._tables._db.execute("DELETE FROM meta WHERE key = 'audit'")
    assert place.settle() == ["kiel was revoked, and the database does not know it"]
    assert place.devices()["kiel"].revoked


def test_a_lost_enrolment_whose_entry_has_no_key_is_named_with_what_to_do(place: Place) -> None:
    aio.run(place.storage.ledger.note("enrolled", "device", name="bonn", token="1f", certificate="ab"))
    place.lose_power()
    assert place.settle() == [LOST_ENROLMENT.format("bonn")]
    assert "fedserver token --for bonn" in LOST_ENROLMENT.format("bonn")
    assert place.lines() == []


@pytest.mark.parametrize("kept", [0, 1])
def test_a_log_that_lacks_entries_which_the_database_knows_is_named_once(place: Place, kept: int) -> None:
    log = place.folder / "audit.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:kept]))
    [line] = place.lines()
    assert "the audit log lacks entry 2" in line
    assert place.settle() == [line]
    assert place.lines() == []
    assert place.events()[-1] == CUT


def test_a_log_of_another_home_is_named(place: Place) -> None:
    other = Place(place.folder / "other")
    other.enrol("ada")
    shutil.copy(other.folder / "audit.jsonl", place.folder / "audit.jsonl")
    [line] = place.lines()
    assert "cut or replaced" in line


def test_a_log_whose_chain_is_broken_stops_a_start(place: Place) -> None:
    aio.run(place.admin.revoke("kiel"))
    log = place.folder / "audit.jsonl"
    log.write_bytes(log.read_bytes().replace(b"kiel", b"bonn", 1))
    with pytest.raises(HomeMismatch, match="line 3"):
        place.settle()


def test_the_head_never_goes_back_to_an_older_entry(place: Place) -> None:
    head = aio.run(place.storage.ledger.snapshot()).audit_head
    assert head is not None
    place.storage.ledger._tables.follow_audit(AuditHead(head.number - 1, "older"))
    assert aio.run(place.storage.ledger.snapshot()).audit_head == head


def test_a_name_that_was_given_to_another_device_does_not_go_back_to_the_revoked_one(place: Place) -> None:
    """The database forgets the revocation, the release of the name and the new enrolment."""
    [stolen] = place.certificates()
    aio.run(place.admin.revoke("kiel"))
    fresh = place.give_away("kiel")
    expected = {name: (device.revoked, device.public_key) for name, device in place.devices().items()}
    assert place.lines() == [] and len(expected) == 2
    place.lose_power()
    assert "the name kiel was given to another device, and the database does not know it" in place.settle()
    assert {name: (device.revoked, device.public_key) for name, device in place.devices().items()} == expected
    assert aio.run(place.registrar.caller(fresh)).name == "kiel"
    with pytest.raises(CertificateRefused, match="was revoked"):
        aio.run(place.registrar.caller(stolen.fingerprint))


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("known", [True, False], ids=["renewed-since", "enrolled-since"])
def test_certificates_of_a_revoked_device_whose_name_was_given_away_stay_revoked(place: Place, known: bool, times: int) -> None:
    """The database forgets a certificate too that the revoked device got before its revocation."""
    name = "kiel" if known else "bonn"
    fresh = fingerprint_of(aio.run(place.registrar.renew(name, csr_der(new_key(), name)))) if known else place.enrol(name)
    stolen = []
    for _ in range(times):
        stolen.append(fresh)
        aio.run(place.admin.revoke(name))
        fresh = place.give_away(name)
    expected = {device: kept.revoked for device, kept in place.devices().items()}
    place.lose_power()
    place.settle()
    assert {device: kept.revoked for device, kept in place.devices().items()} == expected
    assert aio.run(place.registrar.caller(fresh)).name == name
    for fingerprint in stolen:
        with pytest.raises(CertificateRefused, match="was revoked"):
            aio.run(place.registrar.caller(fingerprint))
    assert place.lines() == []
