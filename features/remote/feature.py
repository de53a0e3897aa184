"""Feature `remote`: a server's state in PostgreSQL and S3, and standbys."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(
    name="remote",
    rank=10,
    answers={
        "remote_storage": "server:remote_storage",
        "only_server": "server:only_server",
    },
    commands={"migrate": "shown:migrate"},
)
