"""The aggregation server: one long-lived process that owns the federation's state."""
