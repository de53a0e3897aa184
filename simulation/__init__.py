"""Whole federations in one process: the code of the server and of the devices, joined by calls instead of a network."""
