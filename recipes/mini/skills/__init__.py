"""The skills: one generator per kind of case, each a pure function of a random state and a split."""

from .arithmetic import addition, comparing, counting, subtraction, times_table, two_steps
from .case import HELD, TRAIN, Case, split_of
from .following import follow
from .memory import echo, people, recall, unknown
from .mix import dialogue
from .stories import story, story_and_question
from .structured import json_answer
from .talk import knowledge, no_idea, small_talk
from .tools import no_tool, tool_call, tool_result

__all__ = [
    "HELD", "TRAIN", "Case", "addition", "comparing", "counting", "dialogue", "echo", "follow", "json_answer",
    "knowledge", "no_idea", "no_tool", "people", "recall", "small_talk", "split_of", "story",
    "story_and_question", "subtraction",
    "times_table", "tool_call", "tool_result", "two_steps", "unknown",
]  # fmt: skip
