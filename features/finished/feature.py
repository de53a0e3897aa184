"""Feature `finished`: pictures of a finished model's answers (`fedclient plot`), bets that its error has risen (`watch`)."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(name="finished", rank=60, device_commands={"plot": "shown:plot", "watch": "shown:watch"})
