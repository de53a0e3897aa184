"""Built-in methods by the models that they need."""

from attune.common.methods.registry import get, names

ADAPTED = tuple(name for name in names() if any("lora" in selector for selector, _ in get(name).parts))
OF_ANY_MODEL = [name for name in names() if name not in ADAPTED and "model" not in get(name).defaults]
