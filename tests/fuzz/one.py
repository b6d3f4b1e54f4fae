"""One target under atheris: python -m tests.fuzz.one NAME [libFuzzer's options and folders]"""

import sys
from pathlib import Path

import atheris

# atheris instruments files only: an editable install of the package has its own loader.
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

# Before any import of our package: modules are instrumented when they are imported.
with atheris.instrument_imports(include=["kvasir"], enable_loader_override=False):
    from tests.fuzz.target import attempt, bounded_memory, load

    NAME = sys.argv[1]
    TARGET = load(NAME)


def main() -> None:
    mutator = {"custom_mutator": TARGET.mutate} if TARGET.mutate else {}
    again = f"{sys.executable} -m tests.fuzz.one {NAME}"  # how libFuzzer begins the processes that minimise
    atheris.Setup([again, *sys.argv[2:]], lambda data: attempt(TARGET, data), **mutator)
    with bounded_memory():
        atheris.Fuzz()


if __name__ == "__main__":
    main()
