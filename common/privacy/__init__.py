"""Differential privacy: what a guarantee costs, noise from secrets, and what can be private at all."""
