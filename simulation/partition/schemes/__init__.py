"""Schemes that divide a data set among clients: every split of both papers, by name."""
