"""The text of the model card."""

from .model import Mini
from .train import Progress

TEXT = """\
---
license: apache-2.0
language: en
library_name: kvasir
pipeline_tag: text-generation
---

# kvasir-mini

A chat model of {millions:.2f} million parameters, made for two purposes: a **demo** that answers at once, on
any machine and without a download; and a **test subject** whose right answers are known. It is not a useful
assistant, and says so when asked.

## What it does

Greets and chats in a few turns; remembers facts told earlier in the conversation; adds and subtracts numbers
up to 99; follows simple system prompts; answers in JSON; calls tools that the prompt describes, and reports
their results; thinks briefly between `<think>` tags with `enable_thinking`; tells short stories from a
handful of plots.

## What it does not do

Anything else. It knows only the small world of its training data, in plain English sentences. It has no
knowledge to speak of, it makes mistakes, and it has had no safety training; its vocabulary leaves little room
for harm. Rephrase a request beyond the forms it knows, and it will answer with something near.

## Figures

Share of right greedy answers on generated held-out cases, by `python -m recipes.mini.eval`:

{table}

Held out means: pairs of operands, sets of facts, names, codes, tool arguments and records are assigned to a
split by a hash of their value, and training draws from the other split. The sentences around them are of the
same forms. Small talk, knowledge (capitals, opposites) and stories have no such values: those rows say that
the model learned its lines. The mix of the training data was tuned with an eye on these figures, so they flatter a
little: no case of the held-out split was trained on, but its kinds of failure were seen.

## How it was made

- Architecture: Llama, {layers} layers, hidden {hidden}, ffn {ffn}, {heads} heads of {head_dim} with {kv_heads}
  KV heads, tied embeddings; every matrix has rows that K-quants fit.
- Context: {max_len} tokens; trained on packed rows of 256 and 512, and a few of {max_len}, so that answers far
  into a long conversation are weaker.
- Vocabulary: {vocab} tokens, byte-level BPE, every digit a token of its own.
- Data: generated while training by `recipes/mini/skills`; no text from anywhere else.
- Training: {tokens:.0f} million tokens, {steps} steps, {minutes:.0f} minutes on two CPU cores shared with
  other work; Muon and AdamW, bf16 autocast.
- Weights: bfloat16 in safetensors.
- Chat format: ChatML, tools and calls as in Hermes and Qwen.
- Licence: Apache-2.0.

To make it again, see `recipes/mini/README.md`.
"""


def figures(rows: list[dict]) -> str:
    if not rows:
        return "Not yet evaluated."
    lines = ["| skill | cases | right | bar |", "|---|---|---|---|"]
    for r in rows:
        bar = "" if r["bar"] is None else f"{r['bar']:.0%}"
        lines.append(f"| {r['skill']} | {r['cases']} | {r['share']:.1%} | {bar} |")
    return "\n".join(lines)


def card(model: Mini, progress: Progress, rows: list[dict]) -> str:
    """Markdown of the card; `rows` are the scores, empty before the first evaluation."""
    size = sum(p.numel() for p in model.parameters())
    facts = model.config.to_json() | {
        "millions": size / 1e6,
        "tokens": progress.tokens / 1e6,
        "steps": progress.step,
        "minutes": progress.seconds / 60,
    }
    return TEXT.format(table=figures(rows), **facts)
