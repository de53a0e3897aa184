"""The finished model: kept, used offline, evaluated and drawn."""
