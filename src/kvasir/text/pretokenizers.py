"""How byte-level BPE vocabularies of GGUF files split text before merging: one row per published scheme.

A GGUF names the scheme in `tokenizer.ggml.pre`; the file does not contain the regular expressions. Each row has them in
the form of the model's own tokenizer.json (Oniguruma syntax). They apply one after another to the pieces of the
previous expression; matches and gaps are both kept. The names are those that llama.cpp's converters write. Where
llama.cpp has to simplify an expression for its own matcher (letter case in `tekken` and `gpt-4o`), the row keeps the
model's expression.
"""

from dataclasses import dataclass

from kvasir.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`ignore_merges`: a piece that is a token is taken without merging. `add_bos`: the default if the file does not
    set it. `nfc`: text is normalized to NFC first. `raw_utf8`: tokens are text with `▁` for spaces and `<0xAB>` for
    bytes instead of GPT-2's byte letters."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    raw_utf8: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_LINES = r"[^\n]+|[\n]+"
_SENTENCES = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _words(digits: str, contraction: str = _CONTRACTION + "|") -> str:
    """The expression of tiktoken's cl100k family, whose models differ in how they match runs of digits."""
    marks = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{marks}|{_SPACES}"


def _cased(digits: str, contraction: str = _CONTRACTION + "?", but: str = "") -> str:
    """The expression of the o200k family, which splits words at a change from lower to upper case."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    lead, marks = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    cased = f"{lead}{upper}*{lower}+{contraction}|{lead}{upper}+{lower}*{contraction}"
    return f"{cased}|{digits}|{marks}|{_SPACES}"


# Expressions whose matches always end between an ASCII letter or digit and a space before another letter or digit.
_RUNS = (r"\p{N}{1,3}", r"\p{N}", r"\p{N}+")
SPLITS_BEFORE_SPACES = frozenset([_GPT2, *map(_words, _RUNS), *map(_cased, _RUNS)])

# Cased letters, as DeepSeek LLM's tokenizer lists them; escaped where Unicode normalization (which editors may
# apply) would change them.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "\u1f5f-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄ"
    "Ⰰ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆ\ufb13-\ufb17Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_ASIAN = "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-\ud7afᄀ-ᇿ]+"

_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert "
        "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
        PreTokenizer((_GPT2,)),
    ),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_words(r"\p{N}{1,3}"),))),
    (
        "jais-2",
        PreTokenizer(
            (
                _words(r"\p{N}{1,3}").removesuffix(r"|\s+(?!\S)|\s+")
                + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
                + r"|\s{1,2}(?!\S)|\s{1}",
            )
        ),
    ),
    ("qwen2", PreTokenizer((_words(r"\p{N}"),), nfc=True)),
    (
        "deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2",
        PreTokenizer((_words(r"\p{N}"),)),
    ),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            ),
            nfc=True,
        ),
    ),
    ("ufakzeka", PreTokenizer((_words(r"\p{N}", contraction=""),))),
    ("laguna", PreTokenizer((_LINES, _words(r"\p{N}")))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True)),
    (
        "seed-coder",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
            )
        ),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    ),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((r"\p{N}{1,3}", _KANA, rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")),
    ),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _KANA,
                rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
    ),
    (
        "afmoe",
        PreTokenizer((_THOUSANDS, _ASIAN, rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + _KANA,
                _cased(r"\p{N}"),
            ),
            ignore_merges=True,
        ),
    ),
    ("tekken", PreTokenizer((_cased(r"\p{N}", contraction=""),), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_cased(r"\p{N}{1,3}"),))),
    ("granite-embed-multi-97m", PreTokenizer((_cased(r"\p{N}{1,3}"),), ignore_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased(r"\p{N}{1,3}")))),
    (
        "kimi-k2",
        PreTokenizer((r"[\p{Han}]+|" + _cased(r"\p{N}{1,3}", but=r"&&[^\p{Han}]").replace(r"[\r\n/]*", r"[\r\n]*"),)),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_SENTENCES,))),
    ("viking", PreTokenizer((_SENTENCES, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("gemma4 granite-embed-multi-311m sarvam-moe", PreTokenizer((_LINES,), raw_utf8=True)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: row for names, row in _ROWS for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The row of that name. Raises `UnsupportedModel` if there is none, since a guess could change every id."""
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"the GGUF's pre-tokenizer {name[:80]!r} is not supported",
            f"supported: {', '.join(sorted(PRE_TOKENIZERS))}; the model's Hugging Face folder works, too",
        )
    return PRE_TOKENIZERS[name]
