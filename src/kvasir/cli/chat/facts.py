"""/show in a chat: facts of the model and of the session, under Ollama's names."""

from __future__ import annotations

from kvasir.cli.chat.session import Session
from kvasir.errors import InvalidRequest

SUBJECTS = ("info", "parameters", "system", "template", "license", "modelfile")


async def show(session: Session, argument: str) -> None:
    """Raises InvalidRequest for an unknown subject."""
    match argument:
        case "" | "info":
            _info(session)
        case "parameters":
            _parameters(session)
        case "system":
            session.screen.note(session.conversation.system or "there is no system prompt")
        case "template":
            _template(session)
        case "license":
            texts = session.entry.license if session.entry else ()
            session.screen.note("\n\n".join(texts) or "the store has no license text for this model")
        case "modelfile":
            _modelfile(session)
        case _:
            raise InvalidRequest(f"/show {argument[:40]}", f"expected one of {', '.join(SUBJECTS)}")


def _info(session: Session) -> None:
    info, note = session.front.info, session.screen.note
    note(f"model        {info.name}")
    note(f"class        {info.architecture}")
    note(f"arithmetic   {info.dtype} on {info.device}, {info.grade}")
    note(f"context      {info.max_model_len} tokens")
    note(f"vocabulary   {info.vocab_size} tokens")
    if session.entry:
        details = session.entry.details
        note(f"weights      {details.parameter_size} {details.quantization_level}, {session.entry.weights.path}")


def _parameters(session: Session) -> None:
    """The parameters of the next response that differ from the neutral ones."""
    from dataclasses import fields

    params = session.settings.params(session.front.info.default_sampling)
    neutral = type(params)()
    for name in (f.name for f in fields(params) if f.name != "seed"):
        value = getattr(params, name)
        if value != getattr(neutral, name, None) and isinstance(value, int | float | str | tuple):
            session.screen.note(f"{name:<24} {value}")
    session.screen.note(f"{'seed':<24} {'random' if session.settings.seed is None else session.settings.seed}")


def _template(session: Session) -> None:
    template = session.front.template
    for name, source in template.sources.items() if template else ():
        session.screen.note(source if name == "default" else f"{name}:\n{source}")


def _modelfile(session: Session) -> None:
    from kvasir.cli.store import recipe_of
    from kvasir.store.modelfile import write_modelfile

    if session.entry is None:
        raise InvalidRequest("only models of the store have a Modelfile", "/save NAME makes one of this session")
    session.screen.note(write_modelfile(recipe_of(session.entry)).rstrip())
