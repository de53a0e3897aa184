"""Feature `web`: the dashboard, /metrics, /healthz and /readyz."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(
    name="web",
    rank=30,
    answers={"page": "pages:page", "watch": "pages:page_of_simulation"},
    commands={"dashboard": "shown:dashboard", "dashboard-token": "shown:dashboard_token"},
    packages=("prometheus_client", "starlette", "uvicorn"),
)
