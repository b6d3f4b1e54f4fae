"""An engine whose answers one can read: the real scheduler and pool over a runner that repeats the prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import tokenizers

from kvasir.engine.core import EngineCore
from kvasir.engine.inproc import InProcessEngine
from kvasir.guided.guide import GrammarGuides
from kvasir.guided.vocabulary import Vocabulary
from kvasir.plan import Join, Work
from kvasir.runner.executor import Taken
from kvasir.runner.fake import FakeExecutor, FakeRunner, fake_carry, fake_masked
from kvasir.runner.rows import Row
from kvasir.sched.scheduler import Scheduler
from kvasir.text.byte_level import LETTERS
from kvasir.text.chat import ChatTemplate
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import Task

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
    not allow the next token, it takes the next one that is allowed."""

    draws_columns = False

    def enter(self, join: Join, row: Row) -> None:
        super().enter(join, row)
        if row.ids[: len(POISON)].tolist() == list(POISON.encode()):
            row.fault = "SecretError: inside"

    def draw(self, work: Work, mask: bytes | None) -> Taken:
        row = self.rows[work.row]
        drawn = super().draw(work, mask)
        if drawn.error:
            return drawn
        prompt, done = row.ids[: row.prompt_len].tolist(), work.start + work.count - row.prompt_len
        token = prompt[(done + (row.spec.seed if row.spec.temperature else 0)) % len(prompt)]
        if token in row.spec.stop_ids and done < row.spec.min_tokens:
            token = ord("_")
        token = fake_masked(token, mask, VOCAB)
        carries = row.spec.temperature and not row.spec.guided
        carry = fake_carry(row.carry, [token]) if carries else row.carry
        return Taken((token,), tuple((token, -0.5, 1, top) for _, _, _, top in drawn.logprobs), carry)


class EchoRunner(FakeRunner):
    samples = EchoExecutor


class EchoEngine(InProcessEngine):
    """Takes FakeRunner's options, fields of ModelInfo, and max_waiting of the scheduler."""

    def __init__(self, max_waiting: int = 1024, info: dict | None = None, **runner):
        options = {"vocab_size": VOCAB, "num_blocks": 400, "max_rows": 16, "max_model_len": 512, **runner}
        options.setdefault("tasks", (Task.GENERATE, Task.EMBED))

        def build() -> EngineCore:
            fake = EchoRunner(**options)
            fake.info = replace(fake.info, **(info or {}))
            scheduler = Scheduler(fake.capacity, eos_ids=(EOS,), max_waiting=max_waiting, guides=grammar_guides())
            return EngineCore(fake, scheduler)

        super().__init__(build)
