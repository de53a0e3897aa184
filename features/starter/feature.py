"""Feature `starter`: `fedserver new` writes a small project that runs at once and is there to be edited."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(name="starter", rank=70, commands={"new": "shown:new"})
