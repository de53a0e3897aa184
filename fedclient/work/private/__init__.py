"""Training with noise on the device: gradients that are clipped for each unit, and the ledger of what was spent."""
