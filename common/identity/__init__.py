"""Identity of a peer: the federation's authority, join tokens, certificates, and TLS settings of both sides."""
