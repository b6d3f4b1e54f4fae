"""Writes the model folder: `python -m recipes.mini.export [--to DIR]`.

Weights in bfloat16 under HF names, the tokenizer with its chat template, the configs and the model card. The
folder is
made aside and swapped in, so that nobody reads half of it.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from .card import card
from .chat import TEMPLATE
from .eval import FOLDER
from .model import Mini, MiniConfig, to_hf
from .tokenizer import SPECIAL, VISIBLE
from .train import WORK, Progress, load_model, read

LIMIT = 12_000_000  # bytes the package grants


def tokenizer_config(max_len: int) -> dict:
    tokens = enumerate(SPECIAL + VISIBLE)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {str(i): {"content": t, "special": t in SPECIAL} | flags for i, t in tokens},
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_len,
        "chat_template": TEMPLATE.read_text(),
    }


GENERATION = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
    "max_new_tokens": 256,
}


def write(folder: Path, model: Mini, progress: Progress, tokenizer: Path, scores: Path | None) -> None:
    """Every file of the folder; raises ValueError where it grows over the limit."""
    folder.mkdir(parents=True)
    config = model.config
    save_file(to_hf(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    documents = {
        "config": config.to_hf(),
        "tokenizer_config": tokenizer_config(config.max_len),
        "generation_config": GENERATION,
    }
    for name, value in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")
    rows = json.loads(scores.read_text()) if scores and scores.exists() else []
    (folder / "MODEL_CARD.md").write_text(card(model, progress, rows))
    size = sum(f.stat().st_size for f in folder.iterdir())
    if size > LIMIT:
        raise ValueError(f"the folder has {size} bytes, at most {LIMIT} are granted: train fewer layers")


def swap(new: Path, to: Path) -> None:
    """Puts `new` where `to` is."""
    old = to.with_name(to.name + ".old")
    if to.exists():
        to.rename(old)
    new.rename(to)
    shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the checkpoint and the tokenizer")
    parser.add_argument("--to", type=Path, default=FOLDER)
    parser.add_argument("--scores", type=Path, help="scores written by `eval --out`, for the card")
    args = parser.parse_args()
    tensors, progress = read(args.work / "checkpoint.safetensors")
    model = Mini(MiniConfig(**progress.config))
    load_model(model, tensors)
    new = args.to.with_name(args.to.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    write(new, model, progress, args.work / "tokenizer.json", args.scores)
    swap(new, args.to)
    print(f"{args.to}: step {progress.step}, {sum(f.stat().st_size for f in args.to.iterdir()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
