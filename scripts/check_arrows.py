#!/usr/bin/env python3
"""Checks the imports of the package, by parsing its sources.

A room is a package or module directly below kvasir/. The tables state which rooms may import which (ARROWS), and which
files may use a third-party package (DOORS); docs/architecture.md explains them. To change an arrow, write an ADR and
change the table. Import cycles are violations wherever the imports are, in functions too, and so are names in the
tables or in pyproject.toml that do not exist.

    python scripts/check_arrows.py [package folder]     prints `file:line: violation` for each, then exits with 1
"""

import ast
import sys
import tomllib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

PACKAGE = "kvasir"
GROUND = (
    *("types", "caches", "inputs", "validate", "seeds", "plan", "config", "resolve", "environment", "errors", "memory"),
    *(
        "metrics",
        "snapshot",
        "statistics",
        "replica_statistics",
        "batch_statistics",
        "server_statistics",
        "fields",
        "json_file",
        "speculation",
        "adapters",
    ),
)
THINKING = ("text", "parse", "kv", "sched", "guided", "spec")
COMPUTING = (
    *("device", "ops", "parallel", "quant", "layers", "models"),
    *("weights", "lora", "sampling", "program", "graph", "runner"),
)
EVERYTHING = (*THINKING, *COMPUTING, "engine", "fleet", "store", "data", "serve")

# Room -> the rooms it may import besides itself and the ground (a dotted entry allows only that module of a room).
ARROWS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GROUND, ()),
    "text": (),
    "parse": (),
    "kv": (),
    "sched": ("kv",),
    "guided": ("text", "parse"),
    "spec": ("sched",),
    "device": (),
    "ops": ("device", "quant", "parallel"),
    "parallel": ("device",),
    "quant": (),
    "layers": ("ops", "quant", "parallel"),
    "models": ("layers",),
    "weights": ("quant", "parallel"),
    "lora": ("layers", "models", "weights"),
    "sampling": ("ops",),
    "program": ("ops", "layers", "parallel", "sampling"),
    "graph": ("ops", "layers", "parallel", "program", "sampling"),
    "runner": COMPUTING,
    "engine": (*THINKING, *COMPUTING),
    "fleet": (
        "kv",
        "sched",
        *(f"engine.{name}" for name in ("adapters", "client", "cumulative_stats", "journal", "rest")),
    ),
    "store": ("weights", "text"),
    "data": ("engine", "fleet", "weights"),
    "serve": (
        *("parse", "store", "engine.client", "engine.front", "engine.answer", "engine.reading", "engine.meter"),
        *("engine.pace", "engine.scoring", "engine.thinking", "engine.turns"),
        # of several API processes: an engine behind sockets
        *("engine.adapter_shelf", "engine.frames", "engine.host", "engine.remote", "engine.sockets", "engine.wire"),
    ),
    "cli": EVERYTHING,
    "__init__": ("engine",),
}

# The same within `serve`. Dialects do not import each other; modules that are not listed may import everything.
_HTTP = ("http",)
_AUTH = (*_HTTP, "auth", "telemetry", "settings")
_HOSTING = (*_AUTH, "hosting")
_CONVERSATION = (*_HOSTING, "conversation")
_RECORDS = (*_CONVERSATION, "records")
SERVE_ARROWS: dict[str, tuple[str, ...]] = {
    "http": (),
    "auth": _HTTP,
    "telemetry": (*_HTTP, "auth"),
    "settings": (*_HTTP, "auth.keys"),
    "hosting": _AUTH,
    "conversation": _HOSTING,
    "records": _CONVERSATION,
    **{f"dialects.{name}": _RECORDS for name in ("openai", "anthropic", "ollama", "llamacpp", "tgi", "sglang")},
    "page": _HOSTING,
}
# The same within `kv`: transfers use what describes and keeps blocks, and peers use both.
KV_ARROWS: dict[str, tuple[str, ...]] = {"tiers": (), "transfer": ("tiers",), "peers": ("tiers", "transfer")}
INNER_ARROWS = {"serve": SERVE_ARROWS, "kv": KV_ARROWS}

# Dotted name (an import or an attribute) -> the only files, relative to the package, that may use it.
DOORS: dict[str, tuple[str, ...]] = {
    "ctypes": (
        *("ops/native.py", "ops/*/native.py", "ops/linear/packed.py", "sampling/native.py", "device/*"),
        "program/*",
    ),
    "torch.cuda": ("device/*",),
    "torch.distributed": ("parallel/*",),
    "fastapi": ("serve/*",),
    "starlette": ("serve/*",),
    "uvicorn": ("serve/*",),
    "prometheus_client": ("serve/*",),
    "zmq": ("engine/*",),
    "llguidance": ("guided/*",),
    "jinja2": ("text/*",),
    "tokenizers": ("text/*",),
    "typer": ("cli/*",),
    "rich": ("cli/*", "engine/llm.py"),
    "prompt_toolkit": ("cli/*",),
    "os.environ": ("environment.py",),
    "os.getenv": ("environment.py",),
    "os.putenv": ("environment.py",),
    # An import by name escapes this check, so only tables that map names to modules may do it.
    "importlib.import_module": ("__init__.py", "ops/*", "models/*"),
    # Nowhere: reference implementations belong to the tests; nothing may execute data or a shell; the rest is unused.
    **dict.fromkeys(("transformers", "gguf"), ()),
    "triton": (
        *("ops/launch.py", "ops/kernels.py", "ops/compiling.py", "ops/*/triton*.py", "graph/triton.py"),
        "sampling/triton*.py",
    ),
    "ray": ("data/dataset.py", "cli/cluster/*"),
    "yaml": ("cli/cluster/*",),
    **dict.fromkeys(("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch.load"), ()),
    **dict.fromkeys(("eval", "exec", "compile", "__import__", "os.system", "os.popen"), ()),
}
FORBIDDEN_ARGUMENTS = ("allow_pickle", "shell", "trust_remote_code")
BUILTINS = ("eval", "exec", "compile", "__import__")

# These rooms never import torch; in `engine`, only the files that build and step the computing half do.
NO_TORCH = (*GROUND, *THINKING, "fleet", "store", "data", "serve")
TORCH_IN_ENGINE = ("engine/build.py", "engine/core.py", "engine/worker.py")
# Importing these must not load torch, not even through other modules: the API process and `kvasir --help`.
LOADS_WITHOUT_TORCH = (
    "__init__.py",
    *(f"{name}.py" for name in GROUND),
    *(f"{room}/*" for room in (*THINKING, "fleet", "store", "data", "serve")),
    "engine/__init__.py",
    "engine/client.py",
    "engine/front.py",
    "cli/__init__.py",
    "cli/__main__.py",
)


@dataclass(frozen=True, order=True)
class Violation:
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass
class Module:
    """One source file and the dotted names it uses: `(name, line)`, imported names fully qualified."""

    path: Path
    rel: str
    imports: list[tuple[str, int]] = field(default_factory=list)
    at_load: list[tuple[str, int]] = field(default_factory=list)  # imports that run when the module is imported
    uses: list[tuple[str, int]] = field(default_factory=list)  # attributes and builtins
    keywords: list[tuple[str, int]] = field(default_factory=list)  # arguments given as `name=<not False>`

    @property
    def room(self) -> str:
        return self.rel.partition("/")[0].removesuffix(".py")

    @property
    def dotted(self) -> str:
        return f"{PACKAGE}.{self.rel.removesuffix('.py').replace('/', '.').removesuffix('.__init__')}"


def read(path: Path, package: Path) -> Module:
    """Parse a file. Raises SyntaxError if it is not Python."""
    module = Module(path, path.relative_to(package).as_posix())
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    nodes = list(_nodes(tree))
    names: dict[str, str] = {}
    for node, deferred in nodes:
        for target, local, whole in _imported(node, module.rel):
            module.imports.append((target, node.lineno))
            if not deferred:
                module.at_load.append((target, node.lineno))
            names[local] = target if whole else target.partition(".")[0]
    own = {node.name for node, _ in nodes if isinstance(node, ast.FunctionDef)}
    for node, _ in nodes:
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node, names)):
            module.uses.append((dotted, node.lineno))
        elif isinstance(node, ast.Name) and node.id in BUILTINS and node.id not in own | names.keys():
            module.uses.append((node.id, node.lineno))
        elif isinstance(node, ast.keyword) and node.arg and not _is_false(node.value):
            module.keywords.append((node.arg, node.value.lineno))
    return module


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, breadth first, and whether it is in a block that does not run when its module is imported."""
    todo = deque([(tree, False)])
    while todo:
        node, deferred = todo.popleft()
        yield node, deferred
        deferred = deferred or _deferred(node)
        todo.extend((child, deferred) for child in ast.iter_child_nodes(node))


def _deferred(node: ast.AST) -> bool:
    """Whether the code in this block does not run when its module is imported."""
    is_type_checking = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    return is_type_checking or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def _imported(node: ast.AST, rel: str) -> Iterator[tuple[str, str, bool]]:
    """The names that an import statement binds: (dotted target, local name, whether that name is the whole target)."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, alias.asname or alias.name.partition(".")[0], bool(alias.asname)
    elif isinstance(node, ast.ImportFrom):
        parents = [PACKAGE, *rel.split("/")[:-1]]
        base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
        origin = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            yield f"{origin}.{alias.name}", alias.asname or alias.name, True


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of `a.b.c`, its first part resolved by the file's imports; "" for other expressions."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value, names)):
        return f"{base}.{node.attr}"
    return ""


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


def _within(dotted: str, prefix: str) -> bool:
    return dotted == prefix or dotted.startswith(prefix + ".")


def _in_files(rel: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(rel, pattern) for pattern in patterns)


def arrows(module: Module) -> Iterator[tuple[int, str]]:
    """Imports of other rooms that the table does not allow, and third-party imports of the ground."""
    if module.room not in ARROWS:
        yield 1, f"room `{module.room}` is not in the table of scripts/check_arrows.py"
        return
    allowed = (module.room, *GROUND, *ARROWS[module.room])
    drawn = ", ".join(("the ground", *ARROWS[module.room]))
    for target, line in module.imports:
        top, _, inside = target.partition(".")
        if top == PACKAGE:
            if inside != "__version__" and not any(_within(inside, room) for room in allowed):
                yield line, f"{module.room} -> {inside}: no such arrow (may import: {drawn})"
        elif module.room in GROUND and top not in sys.stdlib_module_names:
            yield line, f"{module.room} -> {top}: the ground imports the standard library only"
        if top == "torch" and not _may_name_torch(module):
            yield line, f"{module.room} -> torch: {module.rel} must not import torch"


def inner_arrows(module: Module) -> Iterator[tuple[int, str]]:
    """Imports between the packages of a room that its table does not allow."""
    room, table = module.room, INNER_ARROWS.get(module.room, {})
    own = next((name for name in table if _within(module.dotted, f"{PACKAGE}.{room}.{name}")), None)
    if own is None:
        return
    for target, line in module.imports:
        inside = target.removeprefix(f"{PACKAGE}.{room}.")
        if inside != target and not any(_within(inside, name) for name in (own, *table[own])):
            drawn = ", ".join(table[own]) or f"none of {room}"
            yield line, f"{room}.{own} -> {room}.{inside}: no such arrow (may import: {drawn})"


def _may_name_torch(module: Module) -> bool:
    if module.room == "engine":
        return module.rel in TORCH_IN_ENGINE
    return module.room not in NO_TORCH


def doors(module: Module) -> Iterator[tuple[int, str]]:
    """Uses of a dependency or a construct outside the files that may use it."""
    for dotted, line in {*module.imports, *module.uses}:
        for name, files in DOORS.items():
            if _within(dotted, name) and not _in_files(module.rel, files):
                where = f"only in {', '.join(files)}" if files else "nowhere in the package"
                yield line, f"{module.room} -> {name}: allowed {where}"
    for keyword, line in module.keywords:
        if keyword in FORBIDDEN_ARGUMENTS:
            yield line, f"{module.room} -> {keyword}=: allowed nowhere in the package"


def torch_chains(modules: dict[str, Module]) -> Iterator[tuple[Module, int, str]]:
    """Modules that must load without torch but load it, each with the chain of imports."""
    for name, module in modules.items():
        if not _in_files(module.rel, LOADS_WITHOUT_TORCH):
            continue
        chain = _path_to_torch(name, modules)
        if chain:
            line = next(line for target, line in module.at_load if chain[1] in _loads(target, modules))
            yield module, line, f"importing it loads torch: {' -> '.join(chain)}"


def _path_to_torch(start: str, modules: dict[str, Module]) -> list[str]:
    """The shortest chain of load-time imports from `start` to torch, or []."""
    paths, seen = [[start]], {start}
    for path in paths:
        for target, _ in modules[path[-1]].at_load:
            for step in _loads(target, modules):
                if step == "torch":
                    return [*path, step]
                if step not in seen:
                    seen.add(step)
                    paths.append([*path, step])
    return []


def _loads(target: str, modules: dict[str, Module]) -> list[str]:
    """The modules that are run by importing `target`: itself and its parents; "torch" for every module of torch."""
    parts = target.split(".")
    if "torch" in parts[:2]:  # torch itself, and bridges like safetensors.torch
        return ["torch"]
    return [name for end in range(1, len(parts) + 1) if (name := ".".join(parts[:end])) in modules]


def circles(modules: dict[str, Module]) -> Iterator[tuple[Module, int, str]]:
    """Import cycles, wherever the imports are: in functions and under TYPE_CHECKING, too."""
    graph = {name: dict.fromkeys(_imports(name, modules)) for name in modules}
    while circle := _circle(graph):
        importer, imported = circle[:2]
        module = modules[importer]
        line = next(line for target, line in module.imports if imported in _loads(target, modules)[-1:])
        yield module, line, f"these import each other: {' -> '.join(circle)}"
        del graph[importer][imported]


def _imports(name: str, modules: dict[str, Module]) -> list[str]:
    """The modules that a module imports by name; a package only if it is imported itself."""
    targets = (_loads(target, modules)[-1:] for target, _ in modules[name].imports)
    return [other for other in chain.from_iterable(targets) if other in modules and other != name]


def _circle(graph: dict[str, dict[str, None]]) -> list[str]:
    """The modules of an import cycle, with the alphabetically first one at both ends; [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = error.args[1][:0:-1]
        first = circle.index(min(circle))
        return [*circle[first:], *circle[: first + 1]]
    return []


def absent(package: Path, project: Path) -> Iterator[str]:
    """Names in the tables, and in the lists of sources in pyproject.toml, that do not exist."""
    files = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    within = (f"{room}.{name}" for room, table in INNER_ARROWS.items() for name in chain(table, *table.values()))
    for name in dict.fromkeys((*ARROWS, *chain.from_iterable(ARROWS.values()), *within, *NO_TORCH)):
        path = name.replace(".", "/")
        if not {f"{path}.py", f"{path}/__init__.py"} & {*files}:
            yield f"scripts/check_arrows.py names `{name}`, which does not exist"
    for pattern in dict.fromkeys((*chain.from_iterable(DOORS.values()), *TORCH_IN_ENGINE, *LOADS_WITHOUT_TORCH)):
        if not any(fnmatch(file, pattern) for file in files):
            yield f"scripts/check_arrows.py names {pattern}, which matches no file"
    for pattern in _sources(tomllib.loads(project.read_text(encoding="utf-8"))["tool"]):
        if not any(project.parent.glob(pattern)):
            yield f"pyproject.toml names {pattern}, which does not exist"


def _sources(tool: dict[str, dict]) -> list[str]:
    """The paths in pyproject.toml that must exist. Excluded paths may be made by a build."""
    build, checks, tests = tool["scikit-build"], tool["pyright"], tool["pytest"]["ini_options"]
    lint = tool["ruff"]["lint"].get("per-file-ignores", {})
    lists = build["wheel"]["packages"], build["sdist"]["include"], checks["include"], tests["testpaths"]
    return [*chain.from_iterable(lists), *checks.get("ignore", ()), *lint]


def check(package: Path) -> list[Violation]:
    """Every violation in the package folder, sorted by place."""
    modules: dict[str, Module] = {}
    found: set[Violation] = set()
    for path in sorted(package.rglob("*.py")):
        try:
            module = read(path, package)
        except SyntaxError as error:
            found.add(Violation(path, error.lineno or 1, f"not Python: {error.msg}"))
            continue
        name = f"{PACKAGE}.{module.rel.removesuffix('.py').replace('/', '.')}"
        modules[name.removesuffix(".__init__")] = module
        found |= {
            Violation(path, line, text) for line, text in (*arrows(module), *inner_arrows(module), *doors(module))
        }
    found |= {
        Violation(module.path, line, text) for module, line, text in chain(torch_chains(modules), circles(modules))
    }
    return sorted(found)


def main(arguments: list[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    package = Path(arguments[0]) if arguments else root / "src" / PACKAGE
    if not package.is_dir():
        print(f"{package} is not a folder", file=sys.stderr)
        return 2
    violations = [*check(package), *(() if arguments else absent(package, root / "pyproject.toml"))]
    for violation in violations:
        print(violation)
    count = sum(1 for _ in package.rglob("*.py"))
    print(f"import arrows: {count} files, {len(violations) or 'no'} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
