"""Buffered rounds in the settings of a run: what they cannot be combined with."""

from __future__ import annotations

from attune.common.config import PrivacySettings, RoundSettings
from attune.common.errors import SettingError
from attune.common.methods.method import ConfiguredMethod
from attune.common.methods.settings.aggregators import VOTES, ClippedSettings
from attune.fedserver.core.embedding_settings import embeds_on_devices
from attune.fedserver.core.encodings import Encodings

ON = 'round.mode = "buffered"'
LEAST_VOTES = 5  # updates in a buffer, with which a vote is worth its name: one of them alone decides nothing


def check_buffered(rounds: RoundSettings, configured: ConfiguredMethod, privacy: PrivacySettings, encodings: Encodings) -> None:
    """Check what buffered rounds cannot be combined with.

    Raises:
        SettingError: It names the setting.
    """
    if rounds.mode != "buffered":
        return
    robust = {s.robust for s in configured.aggregators.values() if isinstance(s, ClippedSettings)} & set(VOTES)
    wrong = {
        "privacy.secure_aggregation: it needs rounds whose devices train at the same time": privacy.secure_aggregation,
        'privacy.unit = "client": it needs rounds whose devices are drawn, and not the fastest ones': privacy.on_server,
        'method.embedding = "device": a device steps its embedding as if its update were fresh': embeds_on_devices(configured),
        f"method {configured.method.name}: sums are handed in once": configured.objective.adds_up,
        'round.train = "all": each order must start from what the server serves': rounds.train == "all",
        "round.over_selection: no update is left over (round.clients is how many devices train at a time)": bool(
            rounds.over_selection
        ),
        f"method.robust = {min(robust, default='')!r} and round.buffer = {rounds.buffer}: a vote needs at least {LEAST_VOTES} "
        "updates": bool(robust) and rounds.buffer < LEAST_VOTES,
        "an encoding of attended parts that is a change from the served value; take bf16, or none (round.encodings)": (
            encodings.handed_in.get("attended", "") in ("int8", "zstd")
        ),
    }
    for why, is_wrong in wrong.items():
        if is_wrong:
            raise SettingError(f"{ON} cannot be combined with {why}")
