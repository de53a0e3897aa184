"""Feature `pictures`: `fedserver plot`, and the pictures of a simulation."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(name="pictures", rank=40, answers={"pictures_of": "plots:pictures_of"}, commands={"plot": "shown:plot"})
