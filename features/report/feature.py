"""Feature `report`: one offline page about a run for people who decide, by `fedserver report` and `attune.report`."""

from attune.seams import FeatureNames

FEATURE = FeatureNames(
    name="report",
    rank=50,
    answers={"report": "shown:report", "write_report": "report_page:write_report"},
    commands={"report": "shown:report_command"},
)
