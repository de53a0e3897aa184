"""Feature `cluster`: devices on the workers of a Ray cluster (executor "ray")."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(name="cluster", rank=20, answers={"ray_workers": "work:ray_workers"})
