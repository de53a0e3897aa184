"""Methods for Attune in a package of their own: rows, settings, an aggregator, an objective and a predictor."""
