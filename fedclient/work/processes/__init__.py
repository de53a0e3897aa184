"""Devices spread over processes of this machine: each device's learner lives in one of them and stays there."""
