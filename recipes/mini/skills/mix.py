"""Whole training conversations: skills one after the other, up to a rough size."""

from collections.abc import Callable
from random import Random

from . import arithmetic, following, memory, stories, structured, talk, tools
from .case import TRAIN, Case, system

Make = Callable[[Random, str], Case]
# What a chat is made of, with weights; each is one or two turns that need no system prompt.
SEGMENTS: list[tuple[Make, float]] = [
    (arithmetic.addition, 30), (arithmetic.subtraction, 20), (arithmetic.times_table, 2),
    (arithmetic.comparing, 4), (arithmetic.counting, 5), (talk.small_talk, 12), (talk.knowledge, 8),
    (talk.no_idea, 3), (memory.echo, 7), (memory.people, 10), (stories.story, 1),
    (structured.record, 2), (structured.listing, 1), (structured.own_keys, 3),
]  # fmt: skip
THINKING: list[tuple[Make, float]] = [
    (lambda r, s: arithmetic.addition(r, s, True), 6), (lambda r, s: arithmetic.subtraction(r, s, True), 4),
    (lambda r, s: arithmetic.comparing(r, s, True), 2), (lambda r, s: talk.small_talk(r, s, True), 2),
    (lambda r, s: tools.tool_call(r, s, True), 2), (memory.thinking_recall, 3), (arithmetic.two_steps, 5),
]  # fmt: skip
NEUTRAL = [
    "You are a helpful assistant.", "You are a helpful AI assistant.", "You are Kvasir-mini.",
    "Be kind and helpful.", "You are a friendly assistant.", "You are a helpful assistant. Be brief.",
    "Help the user.", "Answer the questions.",
]  # fmt: skip
KINDS = ["chat", "recall", "story", "tools", "system", "json", "thinking"]
WEIGHTS = [31, 22, 4, 16, 9, 7, 11]


def dialogue(rng: Random, size: int, split: str = TRAIN) -> Case:
    """A conversation of about `size` words at most; some kinds are short by nature.

    Some get a system prompt that changes nothing, as many clients send one.
    """
    case = _dialogue(rng, size, split)
    if case.messages[0]["role"] != "system" and rng.random() < 0.15:
        case.messages.insert(0, system(rng.choice(NEUTRAL)))
    return case


def _dialogue(rng: Random, size: int, split: str) -> Case:
    kind = rng.choices(KINDS, WEIGHTS)[0]
    if kind == "thinking":
        case = pick(rng, THINKING)(rng, split)
        if case.tools is None and rng.random() < 0.3:
            case.messages[:0] = segment(rng, split)
        return case
    if kind == "tools":
        return tool_session(rng, split, size)
    if kind == "system":
        return following.follow(rng, split)
    if kind == "json":
        return structured.json_answer(rng, split)
    if kind == "story":
        make = stories.story_and_question if rng.random() < 0.3 else stories.story
        return make(rng, split)
    return recall_chat(rng, split, size) if kind == "recall" else chat(rng, split, size)


def pick(rng: Random, weighted: list[tuple[Make, float]]) -> Make:
    return rng.choices([m for m, _ in weighted], [w for _, w in weighted])[0]


def segment(rng: Random, split: str) -> list[dict]:
    return pick(rng, SEGMENTS)(rng, split).messages


def words_in(messages: list[dict]) -> int:
    return sum(len(m["content"]) for m in messages) // 5 + 3 * len(messages)


def chat(rng: Random, split: str, size: int) -> Case:
    """Unrelated requests one after the other."""
    messages: list[dict] = []
    target = size * rng.random() if rng.random() < 0.7 else 0
    while not messages or words_in(messages) < target - 20:
        messages += segment(rng, split)
    return Case("chat", messages)


def recall_chat(rng: Random, split: str, size: int) -> Case:
    """Facts first, then questions among other requests."""
    if rng.random() < 0.25:
        return (memory.unknown if rng.random() < 0.3 else memory.recall)(rng, split)
    told = memory.facts(rng, split, rng.randint(1, 6 if size > 150 else 3))
    messages = memory.tell(rng, told)
    for asked in memory.questions(rng, told):
        if rng.random() < 0.3 and words_in(messages) < size - 60:
            messages += segment(rng, split)
        messages += asked
    return Case("recall chat", messages)


def tool_session(rng: Random, split: str, size: int) -> Case:
    """Calls of the same few tools, their results, and talk in between."""
    kind = rng.random()
    if kind < 0.15:
        return tools.no_tool(rng, split)
    if kind < 0.5:
        return tools.tool_call(rng, split)
    return tools.tool_result(rng, split, 1 if size < 200 else rng.randint(1, 4))
