"""A device whose certificate runs out while its stream is open."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

from tests.e2e.hand import Hand, kind_of
from tests.e2e.harness import Federation


def test_an_expired_certificate_does_not_keep_its_stream(tmp_path: Path) -> None:
    """Change the end of the certificate in the ledger, so that the test does not wait a minute."""
    federation = Federation(tmp_path)
    try:
        server = federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "9")
        mallory = Hand(server.port, server.join_token, "mallory")
        with sqlite3.connect(federation.home / "state.sqlite") as database:
            database.execute("UPDATE certificates SET not_after = ? WHERE name = 'mallory'", (time.time() + 8,))
        stream = mallory.connect()
        stream.next("notice")
        assert kind_of(stream.end) == "certificate-refused"
    finally:
        federation.close()
