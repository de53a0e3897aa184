"""A method is four choices: parts, an aggregator per part, an objective and a predictor."""
