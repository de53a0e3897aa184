"""Recipes that show where federation pays: methods on natural and drawn splits (`python -m benchmarks.recipes`)."""
