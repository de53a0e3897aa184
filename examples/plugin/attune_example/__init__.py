"""Components for Attune in a package of their own: methods, an aggregator, an objective, a predictor, a transform, a reader."""
