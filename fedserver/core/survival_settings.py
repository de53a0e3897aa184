"""Limits of a task: of its method, and of survival, whose loss and score compare samples with each other."""

from __future__ import annotations

from attune.common.config import PrivacySettings, TrainSettings
from attune.common.errors import SettingError
from attune.common.methods.method import ConfiguredMethod, check_task
from attune.common.task import TaskName


def check_task_settings(task: TaskName, configured: ConfiguredMethod, train: TrainSettings, privacy: PrivacySettings) -> None:
    """Refuse a method or settings that cannot be used for the task.

    Raises:
        SettingError: It names the setting, and says what to do.
    """
    check_task(configured, task)
    if task != "survival":
        return
    if privacy.on_devices:
        raise SettingError(
            f'privacy.unit = "{privacy.unit}" cannot be used for survival: the Cox loss is that of a whole batch, so no '
            'sample has a gradient that could be clipped. Take privacy.unit = "client", or privacy.secure_aggregation'
        )
    likelihoods = "it chooses by how likely each held-out sample is, and a Cox model gives no such likelihood"
    for setting, is_set, remedy in (
        ("method.dial", configured.dial is not None, "Leave it out"),
        ("train.score_after", bool(train.scored_rounds), "Leave it out; in place of --method auto name a method"),
        ("train.finish", train.finish == "auto", "Leave it out, or take the method fedavg+ft"),
        ("train.finish_stop", train.finish_stop == "fleet", "Leave it out, or take the method fedavg+ft"),
    ):
        if is_set:
            raise SettingError(f"{setting} cannot be used for survival: {likelihoods}. {remedy}")
