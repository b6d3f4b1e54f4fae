"""`python -m tests.models.cover`: the model types of transformers that generate or embed text, and which of them are
supported.

    python -m tests.models.cover --missing
"""

from __future__ import annotations

import argparse

from kvasir.models.registry import MODELS


def text_types() -> set[str]:
    """The model types of transformers with a class for causal language models or for masked ones."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    return {name for mapping in mappings for name in mapping}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models.cover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--missing", action="store_true", help="list only the types that are not supported")
    options = parser.parse_args()
    types = text_types()
    for name in sorted(types):
        if not options.missing or name not in MODELS:
            print(f"{'  ' if name in MODELS else '- '}{name}")
    extra = sorted(MODELS.keys() - types)
    print(f"\n{len(types & MODELS.keys())} of {len(types)} types; beside them: {', '.join(extra)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
