"""What a device minimises in a local step."""
