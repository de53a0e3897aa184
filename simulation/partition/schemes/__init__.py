"""How a data set is cut into the shards of clients: every split of both papers, by name."""
