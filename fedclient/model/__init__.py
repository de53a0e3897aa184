"""The finished model: saved, used offline, evaluated, drawn."""
