"""Who a peer is: the federation's authority, join tokens, certificates, and the TLS settings of both sides."""
