"""How a device turns a trained model into scores."""
