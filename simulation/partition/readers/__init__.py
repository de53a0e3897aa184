"""Data sets from files, in the forms in which they are published."""
