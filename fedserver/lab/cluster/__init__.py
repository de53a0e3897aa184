"""The pieces of a round, carried out by the workers of a cluster; only this room of the server knows Ray."""
