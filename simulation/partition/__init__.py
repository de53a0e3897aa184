"""Partition of a data set into shards: readers, schemes and pictures."""
