"""Measurements of real processes. Figures are written down as they come out."""
