"""The phases of a round, a file each, with the same verbs: enter, resume, connect, report, progress, aggregated."""
