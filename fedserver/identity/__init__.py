"""The authority, join tokens, certificates, and the server's side of mutual TLS."""
