"""Reads YAML strictly: plain data, no aliases, no key twice, bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kvasir.errors import ConfigError

MOST_BYTES = 1 << 20
MOST_DEPTH = 32


class _Strict(yaml.SafeLoader):
    """Refuses aliases, which can multiply a file's size, and keys that occur twice, of which one would be ignored."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=event.start_mark)
        if self.depth >= MOST_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=f"more than {MOST_DEPTH} levels", problem_mark=mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str" or key.value in seen:
                what = "occurs twice" if key.value in seen else "is not a text; quote it"
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r:.80} {what}", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Any:
    """The data in a file. Raises ConfigError with the line of what is wrong."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES} bytes", "expected the YAML file of a fleet")
        return parse_yaml(data.decode(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", "name the YAML file of a fleet; see docs/fleet.md") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8", "expected the YAML file of a fleet") from None


def parse_yaml(text: str, name: str) -> Any:
    """The data in a text. name: of its file, for errors. Raises ConfigError."""
    try:
        return yaml.load(text, _Strict)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}, line {mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: {error.problem}", "correct the YAML there") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not YAML: {error}", "correct it; see docs/fleet.md") from None
