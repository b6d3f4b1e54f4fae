"""`python -m tests.models.supported`: runs the tests of the families and writes docs/models-supported.md from their
results and from the registry. It takes some twenty minutes; `--quick` leaves the exactness oracle out and keeps its
marks on the page.

    python -m tests.models.supported --quick
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kvasir.models.gguf_names import FAMILIES as ARCHITECTURES
from kvasir.models.registry import MODELS, model_class_for

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "models-supported.md"
LOGITS, GGUF, ORACLE = "logits", "GGUF", "oracle"
FILES = {
    LOGITS: ("test_against_transformers.py", "test_encoders.py", "test_gpt2.py", "test_bert.py", "test_qwen3_5.py"),
    GGUF: ("test_gguf_gemma.py", "test_gguf_llamas.py", "test_gguf_models.py"),
}
TESTS = {LOGITS: "agree or transformers or multimodal", GGUF: "what_its_folder_computes"}
# Tests without the family in their names, and names that are not those of the tables.
OWN = {
    "test_gpt2.py": "gpt2",
    "test_bert.py": "bert",
    "test_the_text_part_of_the_multimodal_checkpoint[qwen3-5-Qwen3_5-Qwen35]": "qwen3_5",
    "test_the_text_part_of_the_multimodal_checkpoint[qwen3-5-moe-Qwen3_5Moe-Qwen35Moe]": "qwen3_5_moe",
}
_HEAD = """# Supported models

Made by `python -m tests.models.supported` from the registry and from the tests that it ran; not written by hand.

- **logits**: random models of the family agree with transformers in float32, to 1e-4 of the largest logit, on texts
  that cross windows and the original length of a scaled rotary embedding.
- **GGUF**: a file written as llama.cpp's converter writes it gives the bits of the folder that it was made from, or
  where the converter changes numbers, agrees to 1e-4.
- **oracle**: the same bits alone, batched, in odd chunks, with preemption, on one and more threads.

A `-` is a test that does not exist or did not run, so what it would show is not known. Memory is of the KV cache in
bfloat16, for the sizes that transformers gives the family by default.

"""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.supported",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="do not run the exactness oracle")
    options = parser.parse_args()
    passed = defaultdict(set) if not options.quick else _marks(ORACLE)
    for kind, files in FILES.items():
        found, failed = _run([str(ROOT / "tests" / "models" / file) for file in files], TESTS[kind])
        if failed:
            return failed
        passed[kind] = found
    if not options.quick:
        passed[ORACLE], failed = _run([str(ROOT / "tests" / "engine" / "test_oracle_models.py")], "")
        if failed:
            return failed
    PATH.write_text(render(passed))
    return 0


class _Results:
    """A plugin of pytest that notes which families' tests passed."""

    def __init__(self) -> None:
        self.passed: set[str] = set()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed and (family := family_of(report.nodeid)):
            self.passed.add(family)


def _run(files: list[str], names: str) -> tuple[set[str], int]:
    results = _Results()
    select = ["-k", names] if names else []
    return results.passed, int(pytest.main(["-q", "-p", "no:cacheprovider", *select, *files], plugins=[results]))


def family_of(nodeid: str) -> str | None:
    """The model type that a test is of."""
    from tests.engine.cores import CONFIGS
    from tests.models import test_encoders, test_gguf_llamas, test_gguf_models
    from tests.models.families import FAMILIES

    file, _, test = nodeid.rpartition("/")[2].partition("::")
    for own, family in OWN.items():
        if own in (file, test):
            return family
    case = re.search(r"\[(.*)\]", test)
    name = case[1] if case else ""
    if file == "test_gguf_models.py":
        config = test_gguf_models.MODELS.get(name)
        return config.model_type if config else None
    if file == "test_oracle_models.py":
        name = re.sub(r"-(float32|bfloat16)-(program|eager)$", "", name)
    tables: dict[str, dict[str, Any]] = {
        "test_against_transformers.py": FAMILIES,
        "test_encoders.py": test_encoders.ENCODERS,
        "test_gguf_llamas.py": test_gguf_llamas.CONFIGS,
        "test_oracle_models.py": CONFIGS,
    }
    config = tables.get(file, {}).get(name)
    return config.get("model_type") if config else None


def _marks(kind: str) -> defaultdict[str, set[str]]:
    """The families that the page gives a mark for."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    if rows:
        place = rows[0].index(kind)
        found[kind] = {row[0].strip("`") for row in rows[1:] if row[place] == "yes"}
    return found


def render(passed: dict[str, set[str]]) -> str:
    """The page. passed: by kind of test, the model types."""
    kinds = (LOGITS, GGUF, ORACLE)
    lines = [f"| family | architectures | {' | '.join(kinds)} | KiB per 1,000 tokens |", "|---|---|---|---|---|---|"]
    for model_type, (_, _, architectures) in sorted(MODELS.items()):
        marks = " | ".join("yes" if model_type in passed[kind] else "-" for kind in kinds)
        lines.append(f"| `{model_type}` | {', '.join(architectures)} | {marks} | {_memory(model_type)} |")
    files = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES))
    return f"{_HEAD}{chr(10).join(lines)}\n\n`general.architecture` of the GGUF files that load: {files}.\n"


def _memory(model_type: str) -> str:
    """Bytes of keys and values in bfloat16; recurrent states and windows do not grow with the text."""
    import transformers

    try:
        config = transformers.AutoConfig.for_model(model_type).to_dict()
        text = config.get("text_config") or config
        model = model_class_for({**config, "architectures": [MODELS[model_type][2][0]]})
        kinds = model(model.Config.from_hf(config if config is text else {**config, "text_config": text})).cache_spec()
    except Exception:  # a family that transformers does not have, or whose defaults are no model
        return "-"
    growing = [kind for kind in kinds if kind.heads and not kind.forgets]
    return f"{sum(kind.heads * (kind.key_dim + kind.value_dim) for kind in growing) * 2 * 1000 // 1024:,}"


if __name__ == "__main__":
    raise SystemExit(main())
