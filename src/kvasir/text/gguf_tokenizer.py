"""The tokenizer of a GGUF file, rebuilt as a `tokenizers.Tokenizer`.

Source: the GGUF specification's `tokenizer.ggml.*` keys; where the specification leaves the meaning open, this follows
llama.cpp, for which the files are made. `tokenizer.ggml.model` names the kind:

    gpt2    byte-level BPE: `merges`, and the scheme in `pre` for splitting text (see pretokenizers.py)
    gemma4  BPE over text with `▁` for spaces and byte tokens; `merges`
    llama   SentencePiece BPE: no merges, the pair whose token has the highest score is merged first
    t5      SentencePiece unigram
    bert    WordPiece; a token that begins a word is stored with `▁` before it, any other without `##`
    rwkv    the longest of the tokens, which are bytes, at each place (see world_vocab.py)

The metadata is treated as hostile and is checked before the library sees it.
"""

import re
from collections.abc import Callable, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.text import pretokenizers
from kvasir.text.gguf_vocab import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocab
from kvasir.text.library import library_errors
from kvasir.text.parts import UNLESS
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.world_vocab import unescaped, world_tokenizer

SPACE = "▁"  # U+2581, SentencePiece's visible space

_FIM = ("pre", "suf", "mid", "pad", "rep", "sep")  # the roles of `fim_<role>_token_id`

# Names of tokens that end a turn. A GGUF states one `eos_token_id`, but chat models have several such tokens.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <|endoftext|> "
    "<|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".split()
)


_CONTROLS = frozenset((USER_DEFINED, text) for text in ("<s>", "</s>", "<unk>", "<pad>"))


def build(metadata: Mapping[str, object]) -> tuple[Tokenizer, SpecialTokens]:
    """Tokenizer and special tokens of a GGUF's metadata (maps keys to ints, floats, bools, strings and arrays).

    Raises `ModelFileError` for inconsistent metadata and `UnsupportedModel` for an unknown kind of tokenizer or
    pre-tokenizer.
    """
    vocab = Vocab.read(metadata)
    if vocab.model not in _BUILDERS:
        raise UnsupportedModel(
            f"tokenizer kind {vocab.model[:80]!r} of the GGUF is not supported",
            f"supported: {', '.join(_BUILDERS)}; the model's Hugging Face folder works, too",
        )
    with library_errors("the GGUF's tokenizer cannot be built"):
        tokenizer = _BUILDERS[vocab.model](vocab)
        _register_special_tokens(tokenizer, vocab)
    return tokenizer, _special_tokens(vocab)


def _byte_level_bpe(vocab: Vocab) -> Tokenizer:
    scheme = pretokenizers.pre_tokenizer(vocab.pre)
    if scheme.raw_utf8:
        return _raw_bpe(vocab)
    model = models.BPE(vocab.ids, vocab.merges(), ignore_merges=scheme.ignore_merges)
    tokenizer = Tokenizer(model)
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_splits(scheme), letters])
    tokenizer.decoder = decoders.ByteLevel()
    return _surround(tokenizer, vocab, add_bos=scheme.add_bos, add_eos=False)


def _raw_bpe(vocab: Vocab) -> Tokenizer:
    """BPE with merges over text whose spaces are `▁`; characters without a token fall back to byte tokens."""
    scheme = pretokenizers.pre_tokenizer("gemma4" if vocab.model == "gemma4" else vocab.pre)
    tokenizer = Tokenizer(models.BPE(vocab.ids, vocab.merges(), byte_fallback=True, **_unknown(vocab)))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_splits(scheme))
    tokenizer.decoder = _sentencepiece_decoder(strip=False)
    # A run of newlines that is a token is taken whole, regardless of the merges.
    runs = [token for token in vocab.ids if len(token) > 1 and not token.strip("\n")]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in runs])
    if vocab.model == "gemma4":  # the first published files wrongly set add_bos_token = false
        return put_ends(tokenizer, before=_bos_eos(vocab)[0], after=None)
    return _surround(tokenizer, vocab, add_bos=scheme.add_bos, add_eos=False)


def _splits(scheme: pretokenizers.PreTokenizer) -> list[pre_tokenizers.Split]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in scheme.patterns]


def _sentencepiece_bpe(vocab: Vocab) -> Tokenizer:
    merges = merges_from_scores(vocab)
    model = models.BPE(vocab.ids, merges, byte_fallback=True, fuse_unk=True, **_unknown(vocab))
    return _surround(_over_visible_spaces(model, vocab), vocab, add_bos=True, add_eos=False)


def merges_from_scores(vocab: Vocab) -> list[tuple[str, str]]:
    """Ranked merges that are equivalent to merging by score: the pair whose token has the highest score comes first.

    A token of n characters can be formed from n - 1 pairs; only pairs whose halves are both tokens count. Tokens with
    equal scores rank by id, since a converter that had no scores to write keeps the order of ids.
    """
    mergeable = [kind == NORMAL for kind in vocab.kinds]
    ids = {token: i for token, i in vocab.ids.items() if mergeable[i]}
    ranked = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-vocab.scores[i], i, left, right))
    ranked.sort()
    return [(vocab.tokens[left], vocab.tokens[right]) for _, _, left, right in ranked]


def _unigram(vocab: Vocab) -> Tokenizer:
    # User-defined tokens score 0, the highest possible log-probability. Those that are found in normalized text have
    # SentencePiece's score.
    best = max((s for s, kind in zip(vocab.scores, vocab.kinds, strict=True) if kind == NORMAL), default=0.0)
    scores = {token: len(token.encode()) * max(best, 0.0) - 0.1 for token in _visible(vocab)}
    scored = [
        (token, scores.get(token, 0.0) if kind == USER_DEFINED else score)
        for token, kind, score in zip(vocab.tokens, vocab.kinds, vocab.scores, strict=True)
    ]
    model = models.Unigram(scored, vocab.special_id("unknown", 2), BYTE in vocab.kinds)
    return _surround(_over_visible_spaces(model, vocab), vocab, add_bos=False, add_eos=True)


def _over_visible_spaces(model: models.Model, vocab: Vocab) -> Tokenizer:
    """A SentencePiece tokenizer: spaces become `▁`, and one is added before the text and after each special token,
    unless the file disables it. There is no pre-tokenizer."""
    tokenizer = Tokenizer(model)
    add_space = vocab.flag("add_space_prefix", True)
    charsmap, visible = vocab.charsmap(), _visible(vocab)
    components: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if visible and add_space:  # the library normalizes tokens like texts, but these must not change
        kept = visible if not charsmap else [components[0].normalize_str(token) for token in visible]
        tokens = "|".join(map(re.escape, kept))
        components.append(normalizers.Replace(Regex(rf"{UNLESS}(?:{tokens})\z)(?=[\s\S])"), SPACE))
    if vocab.flag("remove_extra_whitespaces", False):
        components.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        components.append(normalizers.Replace(Regex(" {2,}"), " "))
    components.append(normalizers.Replace(" ", SPACE))
    if add_space and not visible:
        components.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(components)
    tokenizer.decoder = _sentencepiece_decoder(strip=add_space)
    return tokenizer


def _visible(vocab: Vocab) -> list[str]:
    """User-defined tokens with `▁` in them, such as runs of spaces: they are searched in normalized text. Empty where
    runs of spaces are collapsed to single spaces first."""
    if vocab.model not in ("llama", "t5") or vocab.flag("remove_extra_whitespaces", False):
        return []
    return [token for token, kind in vocab.typed_tokens() if kind == USER_DEFINED and SPACE in token]


def _wordpiece(vocab: Vocab) -> Tokenizer:
    ids = {_wordpiece_name(token, kind): i for i, (token, kind) in enumerate(vocab.typed_tokens())}
    if len(ids) != len(vocab.tokens):
        raise ModelFileError("two tokens of the GGUF's WordPiece vocabulary have the same name")
    unknown = vocab.special_id("unknown", 100)
    if unknown is None:
        raise ModelFileError("the GGUF's WordPiece vocabulary has no unknown token")
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=vocab.tokens[unknown]))
    lowercase = vocab.flag("normalizer.lowercase", True)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=vocab.flag("normalizer.strip_accents", lowercase)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    cls, sep = _bert_ends(vocab)
    return put_ends(tokenizer, before=cls, after=sep, between=() if sep is None else (sep,))


def _wordpiece_name(token: str, kind: int) -> str:
    if token.startswith(SPACE):
        return token[len(SPACE) :]
    whole = kind != NORMAL or (len(token) > 2 and token[0] == "[" and token[-1] == "]")
    return token if whole else "##" + token


def _bert_ends(vocab: Vocab) -> tuple[int | None, int | None]:
    """The ids of [CLS] and [SEP]; the specification spells the key of the latter "seperator"."""
    cls = vocab.special_id("cls", vocab.special_id("bos", 101))
    sep = vocab.special_id("seperator", vocab.special_id("separator", vocab.special_id("eos", 102)))
    return cls, sep


def _world(vocab: Vocab) -> Tokenizer:
    """As in llama.cpp, no bos is added unless the file asks for it."""
    tokens = {i: unescaped(token) for i, (token, kind) in enumerate(vocab.typed_tokens()) if kind == NORMAL}
    controls = {i: token for i, (token, kind) in enumerate(vocab.typed_tokens()) if kind == CONTROL}
    return _surround(world_tokenizer(tokens, controls), vocab, add_bos=False, add_eos=False)


def _sentencepiece_decoder(strip: bool) -> decoders.Decoder:
    components = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(components + ([decoders.Strip(" ", 1, 0)] if strip else []))


def _unknown(vocab: Vocab) -> dict[str, str]:
    default = next((i for i, kind in enumerate(vocab.kinds) if kind == UNKNOWN), None)
    unknown = vocab.special_id("unknown", default)
    return {} if unknown is None else {"unk_token": vocab.tokens[unknown]}


def _surround(tokenizer: Tokenizer, vocab: Vocab, add_bos: bool, add_eos: bool) -> Tokenizer:
    """Add bos and eos tokens around a text if the file (or else the default of the kind) asks for them. A pair has an
    eos after each text and, if the file asks for it, a separator before the second."""
    bos, eos = _bos_eos(vocab)
    before = _wanted(vocab, "add_bos_token", add_bos and bos is not None, bos)
    after = _wanted(vocab, "add_eos_token", add_eos and eos is not None, eos)
    separator = _wanted(vocab, "add_sep_token", False, vocab.special_id("seperator", eos))
    return put_ends(tokenizer, before, after, between=tuple(i for i in (after, separator) if i is not None))


def _wanted(vocab: Vocab, key: str, default: bool, token_id: int | None) -> int | None:
    if not vocab.flag(key, default):
        return None
    if token_id is None:
        raise ModelFileError(f"the GGUF sets {key} but does not say which token that is")
    return token_id


def put_ends(tokenizer: Tokenizer, before: int | None, after: int | None, between: tuple[int, ...] = ()) -> Tokenizer:
    """Make encoding add exactly these ids before and after a text, and between the two texts of a pair."""
    ends = [("before", before), ("after", after), *((f"between{i}", id) for i, id in enumerate(between))]
    named = [{"id": k, "ids": [i], "tokens": [tokenizer.id_to_token(i)]} for k, i in ends if i is not None]
    first, last = ["before"] * (before is not None), ["after:1"] * (after is not None)
    middle = [f"between{i}" for i in range(len(between))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *(["after"] * len(last))], pair=[*first, "$A", *middle, "$B:1", *last],
        special_tokens=named,
    )  # fmt: skip
    return tokenizer


def put_first_space(tokenizer: Tokenizer) -> Tokenizer:
    """Make a SentencePiece tokenizer that adds no spaces add one before a text that does not begin with a space, and
    none after special tokens: the behavior of transformers where tokenizer_config.json has `"legacy": false`."""
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    tokenizer.decoder = _sentencepiece_decoder(strip=True)
    return tokenizer


def _register_special_tokens(tokenizer: Tokenizer, vocab: Vocab) -> None:
    """Control and unknown tokens are special; user-defined tokens are found in the text before anything else."""
    # Phi-3's tokenizer drops the spaces after its markers; GGUF has no field for that.
    rstrip = "phi-3" in vocab.name or "phi3" in vocab.name
    keeps = ("<unk>", "<s>", "<|endoftext|>")
    # Some files declare a control token as user-defined: Phi-3's files do so for </s>.
    special = [t for t, kind in vocab.typed_tokens() if kind in (CONTROL, UNKNOWN) or (kind, t) in _CONTROLS]
    plain = [t for t, kind in vocab.typed_tokens() if kind == USER_DEFINED and (kind, t) not in _CONTROLS]
    visible = frozenset(_visible(vocab))
    if vocab.model == "t5":  # its model finds them itself
        plain = [token for token in plain if token not in visible]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, rstrip=rstrip and token not in keeps) for token in special]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=token in visible) for token in plain])


def _bos_eos(vocab: Vocab) -> tuple[int | None, int | None]:
    if vocab.model == "bert":
        return _bert_ends(vocab)
    bos, eos = {"llama": (1, 2), "t5": (None, 1)}.get(vocab.model, (None, None))
    return vocab.special_id("bos", bos), vocab.special_id("eos", eos)


def _special_tokens(vocab: Vocab) -> SpecialTokens:
    bos, eos = _bos_eos(vocab)
    roles = {
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": vocab.special_id("unknown", None),
        "pad_token": vocab.special_id("padding", None),
        "sep_token": vocab.special_id("seperator", None),
        "mask_token": vocab.special_id("mask", None),
    }
    return SpecialTokens(
        bos_id=bos,
        eos_ids=_end_ids(vocab, eos),
        pad_id=roles["pad_token"],
        unk_id=roles["unk_token"],
        names={name: vocab.tokens[i] for name, i in roles.items() if i is not None},
        fim={role: i for role in _FIM if (i := vocab.special_id(f"fim_{role}", None)) is not None},
    )


def _end_ids(vocab: Vocab, eos: int | None) -> tuple[int, ...]:
    stated = [eos, vocab.special_id("eot", None), vocab.special_id("eom", None)]
    named = [i for i, (text, kind) in enumerate(vocab.typed_tokens()) if text in _ENDS and kind != NORMAL]
    found = list(dict.fromkeys(i for i in stated + named if i is not None))
    texts = {vocab.tokens[i] for i in found}
    # Where messages end with <|end|> but turns with <|return|> or <|call|>, only the latter end a generation.
    if texts & {"<|call|>", "<|calls|>"} and texts & {"<|return|>", "<|flush|>"}:
        found = [i for i in found if vocab.tokens[i] != "<|end|>"]
    return tuple(found)


_BUILDERS: dict[str, Callable[[Vocab], Tokenizer]] = {
    "gpt2": _byte_level_bpe,
    "gemma4": _raw_bpe,
    "llama": _sentencepiece_bpe,
    "t5": _unigram,
    "bert": _wordpiece,
    "rwkv": _world,
}
