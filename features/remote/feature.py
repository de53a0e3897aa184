"""Feature `remote`: a server's state in PostgreSQL and S3, standbys, and transfers between devices and S3 themselves."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(
    name="remote",
    rank=10,
    answers={
        "remote_storage": "attune.features.remote.server:remote_storage",
        "only_server": "attune.features.remote.server:only_server",
        "direct_transfers": "attune.features.remote.server:direct_transfers",
    },
    commands={"migrate": "attune.features.remote.shown:migrate"},
)
