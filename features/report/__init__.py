"""One offline page about a run for people who decide."""
