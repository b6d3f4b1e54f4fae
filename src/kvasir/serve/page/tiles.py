"""The tiles of the page, from the table of statistics."""

from __future__ import annotations

from typing import Any

from kvasir.metrics import rows
from kvasir.statistics import EngineStats, FrontStats


def tiles() -> dict[str, list[dict[str, Any]]]:
    """The numbers of each tile of the page, by title: the field of EngineStats, or the name of latest measurements; and
    the fields of Tile. Tiles that may be hidden are the last."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in (*rows(EngineStats), *rows(FrontStats)):
        name = row.statistic.name if row.statistic.kind == "recent" else row.field
        for tile in row.statistic.tiles:
            number = {"stat": name, "form": tile.form, "text": tile.text, "of": tile.of, "optional": tile.optional}
            found.setdefault(tile.title, []).append(number)
    return dict(sorted(found.items(), key=lambda of: any(number["optional"] for number in of[1])))
