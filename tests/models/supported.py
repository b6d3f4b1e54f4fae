"""`python -m tests.models.supported`: runs the tests of the families, keeps their results in supported.json beside this
file, and writes docs/models-supported.md from these and from the registry.

    python -m tests.models.supported                      everything, about an hour
    python -m tests.models.supported --only qwen3 olmo2   these families; the results of the others stay
    python -m tests.models.supported --kinds logits GGUF  without the chat formats and the exactness oracle
    python -m tests.models.supported --page               runs nothing

A test counts for the model types whose classes it asked the registry for, so new families and new test files need no
entry here. The name of a test says what it compares, see KINDS.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvasir.models import registry
from kvasir.models.gguf_names import FAMILIES as ARCHITECTURES
from kvasir.models.registry import MODELS
from tests.models.families_chat import NO_CHAT, TEMPLATES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models-supported.md"
RESULTS = Path(__file__).with_name("supported.json")
PUBLISHED = ROOT / "tests" / "parse" / "published.json"  # of tests.parse.published, which pytest must import itself
LOGITS, GGUF, CHAT, ORACLE = "logits", "GGUF", "chat format", "oracle"
Results = dict[str, dict[str, bool]]  # kind of test -> model type -> whether all of its tests passed


@dataclass(frozen=True, slots=True)
class Kind:
    """folder, pattern: the files of the tests. names: a part of the tests' names, as for pytest's -k."""

    folder: str
    pattern: str
    names: str

    def files(self) -> list[str]:
        return sorted(str(path) for path in (ROOT / "tests" / self.folder).glob(self.pattern))


KINDS = {
    LOGITS: Kind(
        "models", "test_*.py",
        "(agree or are_those_of_transformers or transformers_computes or multimodal_checkpoint) and not defaults",
    ),
    GGUF: Kind("models", "test_*.py", "what_its_folder_computes or a_file_of or its_folders_logits"),
    CHAT: Kind("parse", "test_table.py", "format_is_detected"),
    ORACLE: Kind(
        "engine", "test_oracle_models.py",
        "(bfloat16 and program) or embeddings_do_not_depend or embeddings_of_models_without",
    ),
}  # fmt: skip
# Families that no class of llama.cpp's converter is for. Ministral 8B is published as a Mistral.
NO_GGUF = {
    *("albert", "cwm", "deberta-v2", "electra", "flex_olmo", "gte", "helium", "hyperclovax", "lfm3", "ministral"),
    *("mpnet", "new"),
    *("olmo_hybrid", "vaultgemma", "zamba2"),
}
_TEXT_PARTS = {"mistral3": "ministral3", "step3p7": "step3p5"}  # where the name says nothing
_HEAD = """# Supported models

Made by `python -m tests.models.supported` from the registry and from the results of the tests (supported.json beside
it); not written by hand. A family is **supported** where all four comparisons ran and passed:

- **logits**: random models of the family agree with transformers in float32, to 1e-4 of the largest logit (of encoders:
  of the hidden rows), on texts that cross windows and the original length of a scaled rotary embedding. rwkv7, which
  transformers does not have, agrees with a decoder written from the paper.
- **GGUF**: a file written as llama.cpp's converter writes it gives the bits of the folder that it was made from, or
  where the converter changes numbers, agrees to 1e-4. `none`: llama.cpp has no such architecture.
- **chat format**: the format of tool calls and of reasoning is found in the family's published template, and what
  models write in it is read, whole and in pieces. Templates are in other packages; tests/parse/published.json has their
  digests, `python -m tests.parse.published` repeats it. `none`: its models are not published with one.
- **oracle**: the same bits alone, batched, in odd chunks, with drafts, with preemption, on one and more threads, with
  NaN in foreign memory.

What was compared for a family also counts for others of the same class, and the text part's file and oracle for the
multimodal checkpoint. Families for which some of them are missing are **partly** supported: what is missing did not
run, or there was no template at hand, so what it would show is not known. Families that are only read, without any
comparison, are **not tried**.

Memory is that of keys and values in bfloat16 per 1,000 tokens, of the layers without a window, for the sizes that
transformers gives the family by default, or a published model has; recurrent states do not grow.

"""


# --- running ------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """A plugin of pytest: which model types' tests passed, and which failed."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    wanted: frozenset[str] = frozenset()
    _asked: set[str] = field(default_factory=set)

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Of tests that are for one model of a list, keeps those of the wanted models."""
        kept = [item for item in items if not self.wanted or (_model_of(item) or "") in ("", *self.wanted)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_setup(self) -> None:
        self._asked.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and not report.failed:
            return
        found = self._asked | of_template(report.nodeid)
        if report.passed:
            self.passed |= found
        elif report.failed:
            self.failed |= found

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Notes each model type that the registry is asked for."""
        whole = registry.model_class

        def model_class(name: str) -> type:
            self._asked.update(kind for kind, (_, _, names) in MODELS.items() if name == kind or name in names)
            return whole(name)

        patch.setattr(registry, "model_class", model_class)


def of_template(nodeid: str) -> set[str]:
    """The model types with the template that a test of tests/parse/test_table.py is of."""
    case = re.search(r"test_table\.py::test_format_is_detected\[(.*)\]", nodeid)
    return {family for family, name in TEMPLATES.items() if case and name == case[1]}


def run(kind: Kind, only: Collection[str]) -> Recorder:
    """Runs the tests in a process of its own: a second run in one process would find modules imported."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        passed, failed = pool.submit(_run, kind, tuple(only)).result()
    return Recorder(passed, failed)


def _run(kind: Kind, only: Collection[str]) -> tuple[set[str], set[str]]:
    names, wanted = kind.names, frozenset()
    if only and kind != KINDS[CHAT]:  # not `is`: this process has a copy
        wanted = frozenset({word for family in only for word in spellings(family)})
        names = f"({names}) and ({' or '.join(sorted(wanted))})"
    recorder = Recorder(wanted=wanted if kind == KINDS[ORACLE] else frozenset())
    with pytest.MonkeyPatch.context() as patch:
        recorder.watch(patch)
        pytest.main(["-q", "-p", "no:cacheprovider", "-k", names, *kind.files()], plugins=[recorder])
    return recorder.passed, recorder.failed


def _model_of(item: Any) -> str | None:
    """The model of a test of the oracle; None if it is not for one of a list."""
    given = getattr(item, "callspec", None)
    case = given.params.get("case") if given else None
    return case[0] if case else given.params.get("kind") if given else None


def spellings(family: str) -> set[str]:
    """How names of tests may spell a model type: itself, or the names of the random models that have it."""
    from tests.engine.cores import CONFIGS, ENCODERS

    made = {name for name, config in (CONFIGS | ENCODERS).items() if config["model_type"] in computed_by(family, GGUF)}
    short = re.sub(r"_(text|v1_dense)$", "", family)
    return {name.replace("_", mark) for name in (family, short) for mark in "_-"} | made


def merged(before: Mapping[str, bool], found: Recorder, only: Collection[str]) -> dict[str, bool]:
    """The results after a run: those of `only`, or without it all, are replaced by what it found."""
    kept = {family: passed for family, passed in before.items() if only and family not in only}
    new = {family: family not in found.failed for family in found.passed | found.failed}
    return dict(sorted((kept | {f: passed for f, passed in new.items() if not only or f in only}).items()))


# --- the page -----------------------------------------------------------------------------------------


def state(family: str, results: Results) -> str:
    """supported, partly or not tried."""
    marks = [mark(family, kind, results) for kind in KINDS]
    if all(found in ("yes", "none") for found in marks):
        return "supported"
    return "partly" if "yes" in (mark(family, kind, results) for kind in KINDS if kind != CHAT) else "not tried"


def mark(family: str, kind: str, results: Results) -> str:
    if family in {CHAT: NO_CHAT, GGUF: NO_GGUF}.get(kind, ()):
        return "none"
    found = results.get(kind, {})
    passed = [found[name] for name in ({family} if kind == CHAT else computed_by(family, kind)) if name in found]
    return "yes" if passed and all(passed) else "FAILED" if passed else "-"


def computed_by(family: str, kind: str) -> set[str]:
    """The model types whose tests count for a family: those with the same class, and for what follows loading those of
    the text part of a multimodal checkpoint."""
    found = {name for name, row in MODELS.items() if row[:2] == MODELS[family][:2]}
    if kind in (GGUF, ORACLE):
        found |= {part for name in found for part in (f"{name}_text", _TEXT_PARTS.get(name)) if part in MODELS}
    return found


def render(results: Results, facts: Mapping[str, tuple[str, str]]) -> str:
    """The page. facts: by model type, its mechanisms and its memory."""
    head = ["family", "", "architectures", *KINDS, "mechanisms", "MiB per 1,000 tokens"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for family, (_, _, architectures) in sorted(MODELS.items()):
        marks = (mark(family, kind, results) for kind in KINDS)
        names = ", ".join(sorted(architectures, key=len))
        cells = (f"`{family}`", state(family, results), names, *marks, *facts.get(family, ("-", "-")))
        lines.append(f"| {' | '.join(cells)} |")
    files = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES))
    return f"{_HEAD}{chr(10).join(lines)}\n\n`general.architecture` of the GGUF files that load: {files}.\n"


def listed(page: str) -> list[str]:
    """The families in the page's table."""
    return re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)


def kept_results() -> Results:
    """The results in supported.json."""
    results: Results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return {kind: results.get(kind, {}) for kind in KINDS}


def read_results() -> Results:
    """The kept results, with those of templates in other packages."""
    results = kept_results()
    return {**results, CHAT: results[CHAT] | from_packages(json.loads(PUBLISHED.read_text()))}


def from_packages(found: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    return {family: found[name]["passed"] for family, name in TEMPLATES.items() if name in found}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.supported",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], choices=sorted(MODELS), metavar="FAMILY")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--page", action="store_true", help="only write the page, from the results so far")
    options = parser.parse_args(arguments)
    for name in () if options.page else options.kinds:
        found = run(KINDS[name], options.only)
        kept = kept_results()  # another run may have written meanwhile
        kept[name] = merged(kept[name], found, options.only)
        RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    results = read_results()
    from tests.models.mechanisms import facts_of  # takes seconds to import

    PAGE.write_text(render(results, {family: facts_of(family) for family in MODELS}))
    return int(any(not passed for found in results.values() for passed in found.values()))


def missing(page: str, families: Iterable[str] = MODELS) -> set[str]:
    """Families that are on the page or in the registry, but not in both."""
    return set(listed(page)) ^ set(families)


if __name__ == "__main__":
    raise SystemExit(main())
