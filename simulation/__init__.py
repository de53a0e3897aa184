"""Whole federations in one process: the server's and the devices' own code, joined by calls instead of a network."""
