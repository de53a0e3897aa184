"""Feature `cluster`: rounds on the workers of a Ray cluster (`--lab ray`), and devices on them (executor "ray")."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(name="cluster", rank=20, answers={"lab_cluster": "server:RayLab", "ray_workers": "work:ray_workers"})
