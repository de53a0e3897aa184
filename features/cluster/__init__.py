"""Devices on the workers of a Ray cluster, in simulations and fleets (executor "ray")."""
