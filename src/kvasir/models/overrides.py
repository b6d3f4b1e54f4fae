"""Fields that a user replaces in a model's config: `--rope-scaling` and `--hf-overrides`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import ConfigError, ModelFileError, quoted
from kvasir.json_file import parse_object
from kvasir.models.config import affects_arithmetic

_TEXT = "text_config"  # of a multimodal model
# What a new scaling keeps of the settings that it replaces.
_KEPT = ("rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, slots=True)
class Overrides:
    """rope: the settings that replace those of the rotary embedding. fields: those that are merged into the config,
    objects within them too."""

    rope: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A text that differs for overrides that differ; "" for none."""
        return json.dumps([self.rope, self.fields], sort_keys=True) if self.rope or self.fields else ""

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with these fields. Raises ConfigError for a field that nothing would read, and for a rope scaling
        where each kind of layer has its own."""
        found = _merged(config, self.fields, "")
        if not self.rope:
            return found
        if isinstance(text := found.get(_TEXT), Mapping):
            return {**found, _TEXT: self._rotated(text)}
        return self._rotated(found)

    def _rotated(self, config: Mapping[str, Any]) -> dict[str, Any]:
        given = config.get("rope_parameters")
        if not given:
            return {**config, "rope_scaling": dict(self.rope)}
        if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
            raise ConfigError(
                "rope_scaling: this model's kinds of layers have rope settings of their own",
                "set rope_parameters in hf_overrides",
            )
        kept = {name: given[name] for name in _KEPT if name in given}
        return {**config, "rope_parameters": {**kept, **self.rope}}


NONE = Overrides()


def read_overrides(rope_scaling: str | None, hf_overrides: str | None) -> Overrides:
    """Parses the options, each a JSON object. Raises ConfigError."""
    return Overrides(_object("rope_scaling", rope_scaling), _object("hf_overrides", hf_overrides))


def _object(name: str, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return parse_object(text, name)
    except ModelFileError as error:
        raise ConfigError(error.message, 'expected a JSON object like {"rope_type": "yarn", "factor": 4}') from error


def _merged(config: Mapping[str, Any], fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    found = dict(config)
    for name, value in fields.items():
        # The reader of the config refuses any other field that it does not know.
        if not where and name not in config and not affects_arithmetic(name):
            raise ConfigError(
                f"hf_overrides: no model reads the field {quoted(name)}",
                "check its spelling in the model's config.json",
            )
        old = config.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            value = _merged(old, value, f"{where}{name}.")
        found[name] = value
    return found
