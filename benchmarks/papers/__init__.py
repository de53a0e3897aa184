"""The papers' tables as files: what is run for each cell, and what the paper prints there (printed.csv)."""
