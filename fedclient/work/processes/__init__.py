"""Devices spread over processes, of this machine or of a Ray cluster: a device's learner lives in one of them and stays there."""
