"""Who may come in: the authority, join tokens, certificates, and the server's side of mutual TLS."""
