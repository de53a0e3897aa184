"""Local: nothing leaves the device. The row that every table of results needs (errata E6)."""

from __future__ import annotations

from attune.common.methods.method import Method

LOCAL = Method(name="local", citation="no paper: training alone", parts=(("*", "private"),))
