"""Narrow interfaces between what the server decides and the world; each has an implementation in memory (`simulation`)."""
