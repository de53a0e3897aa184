"""Feature `remote`: a server's state in PostgreSQL and S3, standbys, and transfers between devices and S3 themselves."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(
    name="remote",
    rank=10,
    answers={
        "remote_storage": "server:remote_storage",
        "only_server": "server:only_server",
        "direct_transfers": "server:direct_transfers",
        "direct_route": "device:DirectRoute",
    },
    commands={"migrate": "shown:migrate"},
)
