"""Differential privacy: what a guarantee costs, and what can be private at all."""
