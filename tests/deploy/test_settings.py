"""federation.toml: it loads, it has every section, and its values are the defaults, so that a copy changes nothing."""

from __future__ import annotations

import msgspec

from attune.common.config import RoundSettings, ServerSettings, Settings, TrainSettings, load_settings
from attune.fedserver.core import planning


def test_the_example_is_the_defaults(deploy):
    said = load_settings(deploy / "federation.toml", (), {})
    assert set(said) == set(Settings.__struct_fields__)
    assert planning.resolve(said) == planning.resolve({})


def test_every_setting_of_a_device_and_of_the_server_is_in_it(deploy):
    said = load_settings(deploy / "federation.toml", (), {})
    unset = {field.encode_name for field in msgspec.structs.fields(TrainSettings) if field.default is msgspec.UNSET}
    by_samples = {"local_epochs"}  # without it the devices' samples decide
    assert set(said["train"]) == set(TrainSettings.__struct_fields__) - unset - by_samples
    assert set(said["server"]) == set(ServerSettings.__struct_fields__)
    assert set(said["round"]) >= set(RoundSettings.__struct_fields__) - {"train"}


def test_what_the_example_leaves_in_comments_is_accepted_too(deploy, tmp_path):
    text = (deploy / "federation.toml").read_text()
    for line in ('name = "vit"', "width = 32", "depth = 2"):
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    path = tmp_path / "federation.toml"
    path.write_text(text)
    settings = planning.resolve(load_settings(path, (), {}))
    from attune.common.models.registry import default_spec

    spec = default_spec("images", (8, 8, 1), 10, 0, settings.model_name, settings.model_options)
    assert msgspec.to_builtins(spec)["options"]["width"] == 32
