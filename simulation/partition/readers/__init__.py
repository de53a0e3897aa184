"""Readers of data sets in the forms in which they are published."""
