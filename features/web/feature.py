"""Feature `web`: the dashboard, /metrics, /healthz and /readyz."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(
    name="web",
    rank=30,
    answers={
        "page": "attune.features.web.pages:page",
        "watch": "attune.features.web.pages:page_of_simulation",
    },
    commands={
        "dashboard": "attune.features.web.shown:dashboard",
        "dashboard-token": "attune.features.web.shown:dashboard_token",
    },
    packages=("prometheus_client", "starlette", "uvicorn"),
)
