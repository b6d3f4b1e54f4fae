"""`kvasir inspect ADAPTER [--model MODEL]`: what an adapter changes, by how much, and whether it fits a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir.cli.show import bytes_text, print_json, print_pairs, print_table
from kvasir.environment import user_path
from kvasir.lora import Adapter, AdapterFile, bind, is_adapter, read_adapter
from kvasir.store.sources import is_path
from kvasir.store.store import ModelStore


def adapter_path(model: str) -> Path | None:
    """The folder or file of an adapter that `model` names, also as the store does; None for anything else."""
    path = user_path(model)
    if is_adapter(path):
        return path
    entry = None if is_path(model) or path.exists() else ModelStore().find(model)
    return Path(entry.weights.path) if entry and entry.is_adapter else None


def run(path: Path, model: str | None, tensors: bool, json: bool) -> None:
    """Raises KvasirError if the adapter is damaged or does not fit the model."""
    file = read_adapter(path)
    adapter = _bound(file, model) if model else None
    facts = adapter_facts(file, adapter, model, tensors)
    if json:
        print_json(facts)
    else:
        _show(facts)


def _bound(file: AdapterFile, model: str) -> Adapter:
    from kvasir.models.registry import model_class_for
    from kvasir.runner.load import open_checkpoint
    from kvasir.weights.find import find_model

    config, source = open_checkpoint(find_model(model, allow_download=False))
    source.close()
    kind = model_class_for(config)
    return bind(file, kind(kind.Config.from_hf(config)), config)  # type: ignore[attr-defined]


def adapter_facts(file: AdapterFile, adapter: Adapter | None, model: str | None, tensors: bool) -> dict[str, Any]:
    """The facts as plain values; sizes in bytes. adapter: bound to the model, None without one."""
    ranks = sorted({update.rank for update in file.updates})
    facts: dict[str, Any] = {
        "adapter": str(file.path),
        "kind": file.kind,
        "base": dict(file.base),
        "content": file.content,
        "bytes": file.nbytes,
        "ranks": ranks,
        "scales": sorted({update.scale for update in file.updates}),
        "dora": any(update.magnitude is not None for update in file.updates),
        "modules": [
            {"module": name, "matrices": count, "rank": rank, "scale": scale}
            for (name, rank, scale), count in _grouped(file).items()
        ],
        "saved": [{"tensor": name, "shape": list(array.shape)} for name, array in file.saved.items()],
        "token_rows": {module: len(ids) for module, (ids, _) in file.tokens.items()},
        "invocation_tokens": list(file.invocation),
    }
    if adapter is not None:
        facts["model"] = model
        facts["changes"] = {
            "matrices": len(adapter.matrices),
            "tables": sorted(adapter.tables),
            "saved": sorted(adapter.saved),
            "token_rows": sorted(adapter.tokens),
        }
    if tensors:
        facts["updates"] = [
            {"module": u.name, "rank": u.rank, "scale": u.scale, "a": list(u.a.shape), "b": list(u.b.shape)}
            for u in file.updates
        ]
    return facts


def _grouped(file: AdapterFile) -> Mapping[tuple[str, int, float], int]:
    """How many matrices have a rank and a scale, by the modules' names without the numbers of layers and experts."""
    names = ((re.sub(r"\.\d+(?=\.)", ".*", update.name), update.rank, update.scale) for update in file.updates)
    return Counter(names)


def _show(facts: Mapping[str, Any]) -> None:
    base = ", ".join(f"{key} {value}" for key, value in facts["base"].items())
    lines: list[tuple[str, Any]] = [
        ("adapter", facts["adapter"]),
        ("kind", f"{facts['kind']}{', DoRA' if facts['dora'] else ''}"),
        ("base model", base or "not stated"),
        ("content", facts["content"]),
        ("size", bytes_text(facts["bytes"])),
        ("rank", ", ".join(map(str, facts["ranks"])) or "none"),
    ]
    if facts["saved"]:
        lines.append(("whole tensors", ", ".join(one["tensor"] for one in facts["saved"])))
    if facts["token_rows"]:
        lines.append(("token rows", ", ".join(f"{n} of {name}" for name, n in facts["token_rows"].items())))
    if facts["invocation_tokens"]:
        lines.append(("active after", " ".join(map(str, facts["invocation_tokens"]))))
    if "changes" in facts:
        lines.append(("fits", f"{facts['model']}: {facts['changes']['matrices']} of its matrices change"))
    print_pairs(lines)
    rows = ((m["module"], m["matrices"], m["rank"], f"{m['scale']:g}") for m in facts["modules"])
    print_table(("module", ">matrices", ">rank", ">scale"), rows, "Low-rank changes")
    if "updates" in facts:
        shapes = (
            (u["module"], " x ".join(map(str, u["a"])), " x ".join(map(str, u["b"])), u["rank"], f"{u['scale']:g}")
            for u in facts["updates"]
        )
        print_table(("module", "A", "B", ">rank", ">scale"), shapes, "All changes")
