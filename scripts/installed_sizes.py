#!/usr/bin/env python3
"""Prints the packages of an environment with their sizes on disk, as rows of a Markdown table, the largest first.

python3 -m venv /tmp/kvasir && /tmp/kvasir/bin/pip install . && /tmp/kvasir/bin/python scripts/installed_sizes.py
"""

from importlib.metadata import Distribution, distributions
from pathlib import Path

BEFORE = {"pip", "setuptools"}  # part of every environment


def disk_bytes(distribution: Distribution) -> int:
    """Bytes of the blocks that the distribution's files occupy, with compiled modules."""
    paths = {str(distribution.locate_file(file)) for file in distribution.files or ()}
    return sum(_blocks(path) for path in paths)


def _blocks(path: str) -> int:
    return Path(path).stat().st_blocks * 512 if Path(path).is_file() else 0


def main() -> None:
    sizes = {each.name: disk_bytes(each) for each in distributions() if each.name not in BEFORE}
    print("| package | MB |\n|---|---|")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"| {name} | {size / 1e6:.1f} |")
    print(f"| **all {len(sizes)}** | **{sum(sizes.values()) / 1e6:.0f}** |")


if __name__ == "__main__":
    main()
