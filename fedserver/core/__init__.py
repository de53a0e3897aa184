"""Decisions: pure files that read no clock, open nothing and see no tensor; settings and plans."""
