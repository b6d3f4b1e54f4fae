"""Sums and differences of numbers up to 99, the small times table, comparing and counting."""

from random import Random

from ..words import COUNTED, person
from .case import Case, bot, draw, user

ADD = [
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "How much is {a} plus {b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.", "Please add {a} and {b}.", "Can you compute {a} + {b}?", "Calculate {a} + {b}.",
    "What do you get when you add {a} and {b}?", "What is the sum of {a} and {b}?", "Tell me {a} plus {b}.",
    "I need to know {a} + {b}.", "what is {a}+{b}", "What's {a} + {b}?", "Compute {a} plus {b}, please.",
]  # fmt: skip
SUBTRACT = [
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "How much is {a} minus {b}?",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.", "Please take {b} away from {a}.", "Can you compute {a} - {b}?",
    "Calculate {a} - {b}.",
    "What is the difference of {a} and {b}?", "Tell me {a} minus {b}.", "What's {a} - {b}?",
]  # fmt: skip
TIMES = [
    "What is {a} * {b}?",
    "{a} * {b}",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "How much is {a} times {b}?",
]
ADD_STORY = [
    "{p} has {a} {x} and gets {b} more. How many {x} does {p} have now?",
    "{p} has {a} {x}. A friend gives {p} {b} {x}. How many {x} is that?",
    "There are {a} {x} in one box and {b} {x} in another. How many {x} are there?",
]
SUBTRACT_STORY = [
    "{p} has {a} {x} and gives {b} away. How many {x} are left?",
    "There are {a} {x}. {p} takes {b} of them. How many {x} are left?",
    "{p} had {a} {x} but lost {b}. How many {x} does {p} have now?",
]


def addends(rng: Random, split: str) -> tuple[int, int]:
    """Two numbers up to 99; the unordered pair belongs to the split."""
    top = 9 if rng.random() < 0.1 else 99
    return draw(rng, split, lambda r: (r.randint(0, top), r.randint(0, 99)), lambda p: ("add", min(p), max(p)))


def minuends(rng: Random, split: str) -> tuple[int, int]:
    """A number up to 99 and one not larger; the pair belongs to the split."""

    def make(r: Random) -> tuple[int, int]:
        a, b = r.randint(0, 99), r.randint(0, 99)
        return max(a, b), min(a, b)

    return draw(rng, split, make, lambda p: ("sub", *p))


def think_add(a: int, b: int) -> str:
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    return f"Ones: {a % 10} + {b % 10} = {ones}. Tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. {tens} + {ones} = {a + b}."


def think_subtract(a: int, b: int) -> str:
    tens = b // 10 * 10
    return f"{a} - {tens} = {a - tens}. {a - tens} - {b % 10} = {a - b}."


def addition(rng: Random, split: str, thinking: bool = False) -> Case:
    a, b = addends(rng, split)
    thought = think_add(a, b) if thinking else ""
    return _solved("addition", rng, ADD, ADD_STORY, a, b, "+", a + b, thought)


def subtraction(rng: Random, split: str, thinking: bool = False) -> Case:
    a, b = minuends(rng, split)
    thought = think_subtract(a, b) if thinking else ""
    return _solved("subtraction", rng, SUBTRACT, SUBTRACT_STORY, a, b, "-", a - b, thought)


def _solved(skill: str, rng: Random, ask: list, tale: list, a: int, b: int, sign: str, c: int, thought: str) -> Case:
    story = rng.random() < 0.15
    x = rng.choice(COUNTED)
    question = rng.choice(tale if story else ask).format(a=a, b=b, x=x, p=person(rng))
    answer = f"{a} {sign} {b} = {c}" + (f", so {c} {x}." if story else ".")
    return Case(skill, [user(question), bot(answer, thought)], want=str(c), thinking=bool(thought))


def times_table(rng: Random, split: str) -> Case:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    return Case("times", [user(rng.choice(TIMES).format(a=a, b=b)), bot(f"{a} * {b} = {a * b}.")], want=str(a * b))


def comparing(rng: Random, split: str, thinking: bool = False) -> Case:
    a, b = draw(rng, split, lambda r: tuple(r.sample(range(100), 2)), lambda p: ("compare", *p))
    bigger = rng.random() < 0.5
    word = rng.choice(["bigger", "larger", "greater"] if bigger else ["smaller", "less"])
    c = max(a, b) if bigger else min(a, b)
    question = rng.choice([f"Which is {word}, {a} or {b}?", f"Which number is {word}: {a} or {b}?"])
    order = "more" if a > b else "less"
    thought = f"{a} is {order} than {b}. They want the {word} one." if thinking else ""
    return Case("comparing", [user(question), bot(f"{c} is {word}.", thought)], want=str(c), thinking=thinking)


def counting(rng: Random, split: str) -> Case:
    a = rng.randint(0, 90) if rng.random() < 0.6 else rng.randint(0, 3)
    kind = rng.randrange(3)
    if kind == 0:
        b = a + rng.randint(2, 9)
        asks = [
            f"Count from {a} to {b}.",
            f"Please count from {a} to {b}.",
            f"Can you count from {a} to {b}?",
        ]
        question = f"Count to {b}." if a == 1 and rng.random() < 0.5 else rng.choice(asks)
        answer = ", ".join(map(str, range(a, b + 1))) + "."
    elif kind == 1:
        question, answer = f"What number comes after {a}?", f"{a + 1} comes after {a}."
    else:
        question, answer = f"What number comes before {a + 1}?", f"{a} comes before {a + 1}."
    return Case("counting", [user(question), bot(answer)], want=answer)


def two_steps(rng: Random, split: str) -> Case:
    """A word problem with a gain and a loss, solved between think tags."""
    a, b = addends(rng, split)
    while a + b > 99:
        a, b = addends(rng, split)
    c = rng.randint(0, a + b)
    p, x = person(rng), rng.choice(COUNTED)
    question = f"{p} has {a} {x}. {p} gets {b} more and then gives away {c}. How many {x} are left?"
    thought = f"First {a} + {b} = {a + b}. Then {a + b} - {c} = {a + b - c}."
    answer = f"{p} has {a + b - c} {x} left."
    return Case("two steps", [user(question), bot(answer, thought)], want=str(a + b - c), thinking=True)
