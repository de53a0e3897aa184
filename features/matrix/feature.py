"""Feature `matrix`: each site's network scored at each other site, by `fedserver evaluate --matrix`."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(
    name="matrix", rank=70, answers={"matrix_of": "server:matrix_of", "matrix_section": "server:matrix_section"}
)
