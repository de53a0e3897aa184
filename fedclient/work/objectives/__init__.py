"""Objectives that a device minimises in local training."""
