"""Who is connected: one session a device, the newest; and what the database says of it for the operator's eyes."""

from __future__ import annotations

import logging
import time

from attune.common.errors import Replaced
from attune.common.plan import Profile
from attune.fedserver.rpc.sessions import Session
from attune.fedserver.stores.sqlite import Store

LOG = logging.getLogger("fedserver")
MAX_LABELS = 500  # characters of its classes that are kept for pictures


class Streams:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions: dict[str, Session] = {}
        store.disconnect_all()

    def __repr__(self) -> str:
        return f"Streams({sorted(self._sessions)})"

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, name: str, profile: Profile, software: str) -> Session:
        """A device's new stream, to which its messages go from now on; an older one is closed."""
        older = self._sessions.pop(name, None)
        if older is not None:
            older.close(Replaced(f"{name} opened a newer stream"))
        session = self._sessions[name] = Session(name, profile)
        labels = ", ".join(map(str, profile.labels))[:MAX_LABELS]
        self._store.update_device(name, connected=1, since=time.time(), samples=profile.samples, note="", labels=labels)
        LOG.info("%s connected (%d samples, %s)", name, profile.samples, software[:40])
        return session

    def leave(self, session: Session) -> bool:
        """The stream is gone. False if the device has a newer one, for which this changes nothing."""
        session.close()
        if not self.is_current(session):
            return False
        del self._sessions[session.name]
        self._store.update_device(session.name, connected=0, since=time.time())
        LOG.info("%s disconnected", session.name)
        return True

    def get(self, name: str) -> Session | None:
        return self._sessions.get(name)

    def is_current(self, session: Session) -> bool:
        return self._sessions.get(session.name) is session

    def profiles(self) -> dict[str, Profile]:
        """What the connected devices declared, those that came first first."""
        return {name: session.profile for name, session in self._sessions.items()}

    def send(self, name: str, **message: object) -> None:
        """One ServerMessage, given as its one field; dropped if the device is not connected."""
        if name in self._sessions:
            self._sessions[name].send(**message)

    def progress(self, name: str, done: float) -> None:
        """How far a device is with its order; written down at each quarter."""
        session = self._sessions.get(name)
        quarter = int(min(max(done, 0.0), 1.0) * 4) / 4
        if session is not None and session.progress != quarter:
            session.progress = quarter
            self._store.update_device(name, progress=quarter)

    def hang_up(self) -> None:
        """Ends every stream, because the server stops; devices come back by themselves when there is one again."""
        for session in self._sessions.values():
            session.close()
