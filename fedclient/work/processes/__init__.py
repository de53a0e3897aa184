"""Devices spread over processes, of this machine or of a Ray cluster: each device's learner lives in one of them."""
