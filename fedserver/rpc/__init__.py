"""The server's door to the network: gRPC services, who may call them, and the devices' streams."""
