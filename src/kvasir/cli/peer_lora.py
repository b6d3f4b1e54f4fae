"""Flags of other engines for adapters, and how they map to ours: those of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir.adapters import AdapterOption, parse_adapters
from kvasir.config import EngineOptions, option

_LISTS = ("--lora-modules", "--lora-paths")

# ruff: noqa: RUF009 - what `option` makes is a field


@dataclass(frozen=True, slots=True)
class LoraFlags:
    """Flags of engine commands besides those of EngineOptions."""

    lora_modules: list[str] | None = option(
        None, "vLLM's and SGLang's --lora: NAME=PATH, or JSON (repeatable).", *_LISTS
    )
    enable_lora: bool = option(
        False, "vLLM's and SGLang's; no effect: requests may always name adapters.", "--enable-lora"
    )
    lora_init_without_apply: bool = option(
        False, "llama.cpp's: adapters apply only where a request says so.", "--lora-init-without-apply"
    )
    max_loaded_loras: int | None = option(
        None, "SGLang's; no effect: all loaded adapters are known, --max-loras of them in memory.", hidden=True
    )
    lora_tuning: str | None = option(
        None,
        "vLLM's and SGLang's; no effect: adapters are computed as they are stored.",
        *("--lora-dtype", "--lora-backend", "--lora-target-modules", "--lora-extra-vocab-size"),
        *("--lora-eviction-policy", "--max-lora-chunk-size"),
        hidden=True,
    )
    fully_sharded_loras: bool = option(False, "vLLM's; no effect.", "--fully-sharded-loras", hidden=True)
    enable_lora_overlap_loading: bool = option(
        False, "SGLang's; no effect: no step waits for a load.", "--enable-lora-overlap-loading", hidden=True
    )


def with_lora_flags(options: EngineOptions, flags: LoraFlags, notes: list[str]) -> EngineOptions:
    """The options with what these flags ask for; adds notes for the user. Raises ConfigError."""
    given = parse_adapters(options.lora or ())
    if flags.lora_init_without_apply:
        given = tuple(replace(one, default=0.0) for one in given)
    named = parse_adapters([_named(text) for text in flags.lora_modules or ()])
    idle = {
        "--max-loaded-loras": flags.max_loaded_loras,
        "--lora-dtype, --lora-backend and the like": flags.lora_tuning,
        "--fully-sharded-loras": flags.fully_sharded_loras or None,
        "--enable-lora-overlap-loading": flags.enable_lora_overlap_loading or None,
    }
    notes += [f"{name}: no effect" for name, value in idle.items() if value is not None]
    every = [one.text for one in (*given, *named)] if named or flags.lora_init_without_apply else options.lora
    return replace(options, lora=every)


def spread(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line with --lora-modules a=b c=d, as vLLM and SGLang take it, as a flag for each."""
    found: list[str] = []
    flag = ""
    for argument in arguments:
        is_adapter = ("=" in argument and not argument.startswith("-")) or argument.startswith("{")
        if flag and is_adapter and found[-1] != flag:
            found.append(flag)
        elif not is_adapter:
            flag = argument if argument in _LISTS else ""
        found.append(argument)
    return found


def _named(text: str) -> str:
    """SGLang's --lora-paths takes a path alone, too, which is then the adapter's name."""
    if "=" in text or text.lstrip().startswith(("{", "[")):
        return text
    return AdapterOption(text, text).text
