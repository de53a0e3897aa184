"""`fedclient shard`: a shard out of a site's own files."""
