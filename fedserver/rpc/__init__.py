"""Network side of the server: gRPC services, authorisation of callers, and the devices' streams."""
