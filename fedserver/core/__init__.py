"""Decisions as pure code, without clock, files and tensors: rounds, orders, settings, plans and accuracies."""
