"""Measurements against real processes: figures are written down as they come out."""
