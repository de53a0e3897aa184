"""Execution of the round's decisions: the coordinator, orders, updates, and the devices' streams."""
