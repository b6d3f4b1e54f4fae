"""A long text that cannot fit costs no more than it takes to know that."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Library

from kvasir.engine import lengths
from kvasir.engine.front import Front
from kvasir.errors import TextTooLong
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.tokenizer import Tokenizer
from tests.serve.fakes import EchoEngine, template


def fusing() -> Tokenizer:
    """Neither its bytes nor slices say how many tokens a text has: a run of unknown characters is one."""
    vocab = {token: i for i, token in enumerate(["<unk>", "<m>", "▁", *"abc", "ab", "▁ab"])}
    library = Library(models.BPE(vocab, [("a", "b"), ("▁", "ab")], unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.add_special_tokens([AddedToken("<m>")])
    return Tokenizer.in_process(library, SpecialTokens())


@pytest.fixture
async def front(monkeypatch):
    monkeypatch.setattr(lengths, "COUNT_BYTES", 1 << 17)
    front = Front(EchoEngine(max_model_len=64), fusing(), template())
    await front.start()
    yield front
    await front.stop()


@pytest.fixture
def tokenized(monkeypatch) -> list[int]:
    """The lengths of the texts that were tokenized."""
    sizes, real = [], Tokenizer.encode_many

    def noted(self, texts, *args, **more):
        sizes.extend(map(len, texts))
        return real(self, texts, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode_many", noted)
    return sizes


@pytest.mark.parametrize("text", ["ab " * 50_000, "中ab" * 50_000], ids=["known", "half known"])
@pytest.mark.parametrize("bound", ["context", "count"])
async def test_known_characters_prove_that_a_text_does_not_fit(front, tokenized, text, bound):
    with pytest.raises(TextTooLong, match=r"64 tokens.*320 characters") as caught:
        await front.encode(text, bound=bound)
    assert caught.value.tokens > 64 and not tokenized


async def test_a_conversation_that_cannot_fit_is_refused(front, tokenized):
    with pytest.raises(TextTooLong):
        await front.encode_chat([{"role": "user", "content": "ab <m> " * 30_000}])
    assert not tokenized


async def test_a_long_text_that_fits_is_accepted(front, tokenized):
    text = "中" * 100_000 + "ab"
    assert len(await front.encode(text)) < 64 and tokenized == [len(text)]


async def test_a_text_whose_beginning_is_enough_is_tokenized_only_up_to_the_bound(front, tokenized):
    """Without places to cut, its beginning takes the whole text."""
    assert len(await front.encode("ab " * 20_000, bound=None, first=10)) > 10
    tokenized.clear()
    with pytest.raises(TextTooLong, match=f"{1 << 17} bytes"):
        await front.encode("ab " * 50_000, bound=None, first=10)
    assert not tokenized
