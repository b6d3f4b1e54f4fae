"""An engine whose answers one can read: the real scheduler and pool over a runner that repeats the prompt."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache

import tokenizers

from kvasir.engine.adapter_loader import make_adapters
from kvasir.engine.core import EngineCore
from kvasir.engine.inproc import InProcessEngine
from kvasir.guided.guide import GrammarGuides
from kvasir.guided.vocabulary import Vocabulary
from kvasir.plan import Join, Work
from kvasir.runner.executor import Taken
from kvasir.runner.fake import FakeExecutor, FakeRunner, fake_carry, fake_masked
from kvasir.runner.rows import Row
from kvasir.sched.drafts import Drafter
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence
from kvasir.text.byte_level import LETTERS
from kvasir.text.chat import ChatTemplate
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import Task
from tests.sched.one_by_one import OneByOne

EOS, BOS, START, END = 256, 257, 258, 259
VOCAB = 260
POISON = "\x1c\x1dx"  # a prompt that begins so, as none does by chance, fails in the runner
SPECIAL = {"<eos>": EOS, "<bos>": BOS, "<|start|>": START, "<|end|>": END}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}{% if shout %}{{ shout }}{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@lru_cache
def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; four special tokens follow."""
    vocab = {LETTERS[i]: i for i in range(256)} | SPECIAL
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in SPECIAL])
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return Tokenizer.in_process(backend, SpecialTokens(bos_id=BOS, eos_ids=(EOS,), names=names))


@lru_cache
def template() -> ChatTemplate:
    return ChatTemplate(TEMPLATE, {"bos_token": "<bos>", "eos_token": "<eos>"})


@lru_cache
def grammar_guides() -> GrammarGuides:
    """Of all engines: what one has compiled the next need not."""
    return GrammarGuides(lambda: Vocabulary(byte_tokenizer(), VOCAB, (EOS,)))


class EchoExecutor(FakeExecutor):
    """Answers with the prompt, over and over; with a temperature it begins where the seed says. Where a grammar does
    not allow the next token, it takes the next one that is allowed. Drafts are checked as every runner does."""

    draws_columns = False

    def enter(self, join: Join, row: Row) -> None:
        super().enter(join, row)
        if row.ids[: len(POISON)].tolist() == list(POISON.encode()):
            row.fault = "SecretError: inside"

    def draw(self, work: Work, mask: bytes | None) -> Taken:
        row, end = self.rows[work.row], work.start + work.count
        drawn = super().draw(work, mask)
        if drawn.error:
            return drawn
        size = len(mask) // (work.drafted + 1) if mask else 0
        tokens: list[int] = []
        for at in range(end - work.drafted, end + 1):
            own = mask[len(tokens) * size : (len(tokens) + 1) * size] if mask else None
            tokens.append(self.echo(row, at - row.prompt_len, own))
            if at < end and row.ids[at] != tokens[-1]:
                break
        carries = row.spec.temperature and not row.spec.guided
        carry = fake_carry(row.carry, tokens) if carries else row.carry
        tops = [top for _, _, _, top in drawn.logprobs][:1] * len(tokens)
        return Taken(tuple(tokens), tuple((t, -0.5, 1, top) for t, top in zip(tokens, tops, strict=False)), carry)

    def echo(self, row: Row, done: int, mask: bytes | None) -> int:
        """The token after `done` tokens of the answer."""
        prompt = row.ids[: row.prompt_len].tolist()
        token = prompt[(done + (row.spec.seed if row.spec.temperature else 0)) % len(prompt)]
        if token in row.spec.stop_ids and done < row.spec.min_tokens:
            token = ord("_")
        return fake_masked(token, mask, VOCAB)


class EchoRunner(FakeRunner):
    samples = EchoExecutor


class Predicted(OneByOne):
    """Drafts the request's prediction from where the answer is, right or wrong."""

    def guess(self, seq: Sequence, most: int) -> Seq[int]:
        wanted = seq.request.speculation
        allowed = wanted is None or wanted.methods is None or "ngram" in wanted.methods
        most = min(most, most if wanted is None or wanted.most is None else wanted.most)
        done = len(seq.tokens) - seq.prompt_len
        return seq.request.prediction[done : done + most] if allowed else ()


class Echoed(OneByOne):
    """Guesses that a greedy answer repeats the prompt, as it does, and now and then something wrong."""

    def guess(self, seq: Sequence, most: int) -> Seq[int]:
        prompt, done = seq.tokens[: seq.prompt_len], len(seq.tokens) - seq.prompt_len
        return [prompt[(done + i) % len(prompt)] if done % 4 < 3 else 0 for i in range(min(most, 5))]


class EchoEngine(InProcessEngine):
    """Takes FakeRunner's options, fields of ModelInfo, and max_waiting of the scheduler. drafts: with the drafter
    Predicted, under the name ngram; or with another drafter."""

    def __init__(self, max_waiting: int = 1024, info: dict | None = None, drafts: bool | Drafter = False, **runner):
        options = {"vocab_size": VOCAB, "num_blocks": 400, "max_rows": 16, "max_model_len": 512, **runner}
        options.setdefault("tasks", (Task.GENERATE, Task.EMBED))
        own = {"drafters": ("ngram",), "draft_max": 8} if drafts else {}

        def build() -> EngineCore:
            fake = EchoRunner(**options)
            fake.info = replace(fake.info, **own, **(info or {}))
            scheduler = Scheduler(
                fake.capacity,
                eos_ids=(EOS,),
                max_waiting=max_waiting,
                guides=grammar_guides(),
                drafter=Predicted() if drafts is True else drafts or None,
                adapters=make_adapters(fake, fake.info),
            )
            return EngineCore(fake, scheduler)

        super().__init__(build)
