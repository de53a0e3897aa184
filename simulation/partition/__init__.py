"""Cutting a data set into shards: readers, schemes and pictures."""
