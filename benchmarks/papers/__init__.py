"""The papers' tables as files: the runs for each cell, and the figures that the paper prints (printed.csv)."""
