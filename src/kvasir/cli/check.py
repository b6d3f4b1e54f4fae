"""Checks of a request before the model is loaded, as far as the front of the engine can check it."""

from __future__ import annotations

from contextlib import closing

from kvasir.config import EngineOptions
from kvasir.engine.front import Front
from kvasir.engine.grammars import Grammars
from kvasir.errors import InvalidRequest, UnsupportedModel
from kvasir.guided.vocabulary import Vocabulary
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import SamplingParams, StructuredOutputs
from kvasir.weights.find import find_model


def check_asked(front: Front, params: SamplingParams, chat: bool) -> None:
    """Raises InvalidRequest or UnsupportedModel if the model's text side cannot serve these parameters."""
    if front.tokenizer is None:
        raise UnsupportedModel("this model has no tokenizer", "give one with --tokenizer")
    if chat:
        check_template(front)
    if params.structured_outputs is not None:
        _check_structured(front.tokenizer, params.structured_outputs)
    if params.thinking_token_budget is not None:
        if not chat:
            raise InvalidRequest(
                "--thinking-token-budget bounds the reasoning of answers, and the prompt is a text to continue",
                "leave it out, or use a model with a chat template and no --no-chat",
            )
        if front.reader.format().thinking is None:
            raise InvalidRequest("this model marks no reasoning, so a budget cannot be applied", "leave the budget out")


def check_length(options: EngineOptions, max_tokens: int | None) -> None:
    """Checks max_tokens for a prompt of one token against the model's configuration. Raises KvasirError."""
    if max_tokens is None:
        return
    from kvasir.models.overrides import read_overrides
    from kvasir.models.registry import model_class_for
    from kvasir.runner.load import open_checkpoint

    overrides = read_overrides(options.rope_scaling, options.hf_overrides)
    config, source = open_checkpoint(find_model(options.model, options.revision), overrides)
    source.close()
    longest = model_class_for(config).Config.from_hf(config).context_length  # type: ignore[attr-defined]
    context = min(longest, options.max_model_len or longest)
    if max_tokens >= context:
        message = f"max_tokens is {max_tokens}; the context holds {context} with the prompt"
        raise InvalidRequest(message, f"lower it to {context - 1} at most", param="max_tokens")


def _check_structured(tokenizer: Tokenizer, wanted: StructuredOutputs) -> None:
    """Compiles the grammar for the tokenizer's ids; the model may have more ids."""
    with closing(Grammars(lambda: Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))) as grammars:
        grammars.of(wanted)


def has_template(front: Front) -> bool:
    """Whether the model can answer messages."""
    return front.template is not None and bool(front.template.sources)


def check_template(front: Front) -> None:
    if not has_template(front):
        raise InvalidRequest(
            "this model has no chat template",
            "use `kvasir run MODEL TEXT` to continue a text, or give a template with --chat-template",
        )
