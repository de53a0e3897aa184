"""`fedclient shard`: making a shard from a site's own files."""
