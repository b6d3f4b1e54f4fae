"""The tokenizer of a Hugging Face folder: tokenizer.json, SentencePiece's tokenizer.model, or RWKV's vocabulary.

tokenizer.json, as the `tokenizers` library reads it, defines the ids. Other files in the folder define which tokens
begin and end a text:

    tokenizer_config.json, special_tokens_map.json   the texts of bos_token, eos_token, pad_token, ...
    tokenizer_config.json                            add_bos_token, add_eos_token: take precedence where present
    generation_config.json, else config.json         eos_token_id: one id or several
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvasir.errors import ModelFileError, quoted
from kvasir.json_file import read_json_object
from kvasir.text import gguf_tokenizer
from kvasir.text.gguf_vocab import PREFIX
from kvasir.text.library import library_errors
from kvasir.text.sentencepiece_model import read_sentencepiece
from kvasir.text.special_tokens import END_OF_TEXT, SpecialTokens
from kvasir.text.world_vocab import read_world, spelling, vocab_file, world_tokenizer

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load(folder: Path) -> tuple[Tokenizer, SpecialTokens]:
    """Tokenizer and special tokens of the folder. Raises `ModelFileError` if it has no tokenizer or a malformed one."""
    config = _read_json(folder / "tokenizer_config.json")
    if (folder / "tokenizer.json").is_file():
        with library_errors("tokenizer.json cannot be read"):
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif (folder / "tokenizer.model").is_file():
        tokenizer = _from_sentencepiece(folder / "tokenizer.model", config)
    elif (world := vocab_file(folder)) is not None:
        tokenizer = _from_world(world, config)
    else:
        raise ModelFileError(
            f"no tokenizer in {folder.name}",
            "expected tokenizer.json, tokenizer.model (SentencePiece) or rwkv_vocab_v20230424.txt",
        )
    # Files saved during training often truncate or pad; here no text may be truncated silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    special = _special_tokens(tokenizer, folder, config)
    _put_stated_ends(tokenizer, config, special)
    return tokenizer, special


def _from_sentencepiece(path: Path, config: dict[str, Any]) -> Tokenizer:
    metadata = read_sentencepiece(path)
    for flag, default in (
        ("add_bos_token", True),
        ("add_eos_token", False),
    ):  # the defaults of transformers' Llama tokenizer
        value = config.get(flag)
        metadata[PREFIX + flag] = value if isinstance(value, bool) else default
    prefix = PREFIX + "add_space_prefix"
    metadata[prefix] = metadata[prefix] and config.get("add_prefix_space") is not False
    once = config.get("legacy") is False and metadata[prefix]
    if not once:  # a space before the text and after each special token, as SentencePiece does before each text
        return gguf_tokenizer.build(metadata)[0]
    return gguf_tokenizer.put_first_space(gguf_tokenizer.build({**metadata, prefix: False})[0])


def _from_world(path: Path, config: dict[str, Any]) -> Tokenizer:
    """The config names the token 0. Its further tokens are texts that the vocabulary already has."""
    added = config.get("added_tokens_decoder")
    first = added.get("0") if isinstance(added, dict) else None
    with library_errors(f"{path.name} cannot be read"):
        return world_tokenizer(read_world(path), {0: _text(first, "the token 0") or END_OF_TEXT})


def _put_stated_ends(tokenizer: Tokenizer, config: dict[str, Any], special: SpecialTokens) -> None:
    """As in transformers, these flags take precedence over the template in tokenizer.json."""
    stated = [config.get("add_bos_token"), config.get("add_eos_token")]
    if True not in stated and False not in stated:
        return
    before = special.bos_id if stated[0] is True else None
    after = next(iter(special.eos_ids), None) if stated[1] is True else None
    with library_errors("tokenizer.json cannot be used"):
        if tokenizer.encode("").ids != [i for i in (before, after) if i is not None]:
            gguf_tokenizer.put_ends(tokenizer, before, after)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or {} if the file is absent. Raises `ModelFileError` for any other content."""
    return read_json_object(path) if path.is_file() else {}


def _special_tokens(tokenizer: Tokenizer, folder: Path, config: dict[str, Any]) -> SpecialTokens:
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    names = {role: text for role in _ROLES if (text := _text(merged.get(role), role)) is not None}
    ids = {role: _id_of(tokenizer, text) for role, text in names.items()}
    generation = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    eos = [ids.get("eos_token"), *_ids(generation.get("eos_token_id"), "eos_token_id")]
    bos = ids.get("bos_token")
    if bos is None:
        bos = next(iter(_ids(generation.get("bos_token_id"), "bos_token_id")), None)
    return SpecialTokens(
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
        pad_id=ids.get("pad_token"),
        unk_id=ids.get("unk_token"),
        names=names,
    )


def _id_of(tokenizer: Tokenizer, text: str) -> int | None:
    """The id of a token; in RWKV's vocabulary, also of one that is not a marker, such as the two newlines that end a
    turn."""
    found = tokenizer.token_to_id(text)
    if found is None and type(tokenizer.model).__name__ == "WordLevel":
        return tokenizer.token_to_id(spelling(text.encode()))
    return found


def _text(token: object, role: str) -> str | None:
    """A special token is stored as its text or as an object with its text under "content"."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) or not text:
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{role} of the tokenizer's files is {quoted(text)}, which is not valid Unicode"
        raise ModelFileError(problem, "expected the text of a token") from error
    return text


def _ids(value: object, key: str) -> list[int]:
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ModelFileError(f"{key} of the generation config is {value!r:.80}, expected an id or a list of ids")
    return ids
