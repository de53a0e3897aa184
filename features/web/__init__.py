"""HTTP interface for browsers and monitors, on a port of its own: the dashboard, /metrics, /healthz and /readyz."""
