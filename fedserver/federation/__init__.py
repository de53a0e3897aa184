"""What carries the decisions out: the coordinator, orders and updates, and the devices' streams."""
