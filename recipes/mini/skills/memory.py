"""Facts told earlier in the conversation and asked for later; facts never told are not known."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from .. import words
from .case import Case, bot, draw, split_of, user


@dataclass(frozen=True)
class Attribute:
    """Something a user can have told: how it is told, asked, answered, and called when unknown."""

    draw: Callable[[Random], str]
    tell: list[str]
    ask: list[str]
    answer: str
    noun: str
    open_ended: bool = False  # values are many, so that held-out values are never seen in training


def favourite(noun: str, pool: list[str]) -> Attribute:
    return Attribute(
        lambda r: r.choice(pool),
        [f"My favourite {noun} is {{v}}."] + ([] if noun == "food" else [f"I like {{v}} best of all {noun}s."]),
        [
            f"What is my favourite {noun}?",
            f"Which {noun} do I like best?",
            f"Do you remember my favourite {noun}?",
        ],
        f"Your favourite {noun} is {{v}}.",
        f"your favourite {noun}",
    )


def relative(noun: str, draw_name: Callable[[Random], str]) -> Attribute:
    return Attribute(
        draw_name,
        [f"My {noun} is called {{v}}.", f"I have a {noun} called {{v}}.", f"My {noun}'s name is {{v}}."],
        [f"What is my {noun} called?", f"What is my {noun}'s name?", f"What is the name of my {noun}?"],
        f"Your {noun} is called {{v}}.",
        f"your {noun}'s name",
        open_ended=True,
    )


def secret(noun: str) -> Attribute:
    return Attribute(
        words.code,
        [
            f"The {noun} is {{v}}.",
            f"Remember the {noun}: {{v}}.",
            f"Please remember that the {noun} is {{v}}.",
        ],
        [
            f"What is the {noun}?",
            f"What was the {noun}?",
            f"Can you tell me the {noun}?",
            f"Tell me the {noun}.",
        ],
        f"The {noun} is {{v}}.",
        f"the {noun}",
        open_ended=True,
    )


def place(noun: str) -> Attribute:
    return Attribute(
        lambda r: r.choice(words.SPOTS),
        [f"My {noun} is {{v}}.", f"I put my {noun} {{v}}.", f"I left my {noun} {{v}}."],
        [f"Where is my {noun}?", f"Where did I put my {noun}?", f"Do you know where my {noun} is?"],
        f"Your {noun} is {{v}}.",
        f"where your {noun} is",
    )


ATTRIBUTES: dict[str, Attribute] = {
    "name": Attribute(
        words.person,
        ["My name is {v}.", "I am {v}.", "I'm {v}.", "You can call me {v}.", "Hi, I am {v}.",
         "Hello, my name is {v}."],
        ["What is my name?", "What's my name?", "Do you remember my name?", "Who am I?",
         "Can you tell me my name?"],
        "Your name is {v}.", "your name", True),
    "town": Attribute(
        words.town,
        ["I live in {v}.", "I am from {v}.", "My home is in {v}.", "I come from {v}."],
        ["Where do I live?", "Where am I from?", "Which town do I live in?", "In which city do I live?"],
        "You live in {v}.", "where you live", True),
    "age": Attribute(
        lambda r: str(r.randint(5, 99)),
        ["I am {v} years old.", "I'm {v} years old.", "My age is {v}."],
        ["How old am I?", "What is my age?", "Do you remember how old I am?"],
        "You are {v} years old.", "how old you are"),
    "job": Attribute(
        lambda r: r.choice(words.JOBS),
        ["I work as a {v}.", "I am a {v}.", "My job is {v}."],
        ["What is my job?", "What do I do for work?", "What do I work as?"],
        "You work as a {v}.", "what your job is"),
    "hobby": Attribute(
        lambda r: r.choice(words.HOBBIES),
        ["My hobby is {v}.", "I love {v}.", "In my free time I enjoy {v}."],
        ["What is my hobby?", "What do I enjoy in my free time?"],
        "Your hobby is {v}.", "what your hobby is"),
    "month": Attribute(
        lambda r: r.choice(words.MONTHS),
        ["My birthday is in {v}.", "I was born in {v}."],
        ["When is my birthday?", "In which month was I born?"],
        "Your birthday is in {v}.", "when your birthday is"),
    "instrument": Attribute(
        lambda r: r.choice(words.INSTRUMENTS),
        ["I play the {v}.", "I am learning the {v}."],
        ["Which instrument do I play?", "What instrument do I play?"],
        "You play the {v}.", "which instrument you play"),
    "number": Attribute(
        lambda r: str(r.randint(1, 99)),
        ["My lucky number is {v}.", "My favourite number is {v}."],
        ["What is my lucky number?", "What is my favourite number?"],
        "Your number is {v}.", "your lucky number"),
    "word": Attribute(
        words.made_up,
        ["The secret word is {v}.", "Remember the word {v}.", "Please remember this word: {v}."],
        ["What is the secret word?", "Which word did I tell you?", "What was the word?"],
        "The word is {v}.", "the word", True),
} | {noun: favourite(noun, pool) for noun, pool in {
    "colour": words.COLOURS, "animal": words.ANIMALS, "food": words.FOODS, "drink": words.DRINKS, "day": words.DAYS,
}.items()} | {noun: relative(noun, words.pet) for noun in ("dog", "cat", "horse", "parrot")} | {
    noun: relative(noun, words.person) for noun in ("sister", "brother", "friend", "teacher", "boss",
    "neighbour")
} | {noun: secret(noun) for noun in ("door code", "room number", "password", "order number",
"ticket number")} | {
    noun: place(noun) for noun in ("phone", "key", "book", "hat", "umbrella", "wallet", "bag")
}  # fmt: skip

ACKS = [
    "I will remember that.",
    "Got it.",
    "Okay, I will remember.",
    "Thank you for telling me.",
    "Noted.",
    "Good to know.",
]
Facts = dict[str, str]


def facts(rng: Random, split: str, num: int) -> Facts:
    """Attributes and values; the whole set and every open-ended value belong to the split."""

    def make(r: Random) -> Facts:
        names = r.sample(sorted(ATTRIBUTES), num)
        return {n: _value(r, n, split) for n in names}

    return draw(rng, split, make, lambda f: ("facts", *sorted(f.items())))


def _value(rng: Random, name: str, split: str) -> str:
    a = ATTRIBUTES[name]
    while True:
        value = a.draw(rng)
        if not a.open_ended or split_of("value", value) == split:
            return value


def tell(rng: Random, told: Facts) -> list[dict]:
    """One or two facts a message, each acknowledged."""
    messages, rest = [], list(told.items())
    while rest:
        take = 1 if rng.random() < 0.6 else rng.randint(2, 3)
        now, rest = rest[:take], rest[take:]
        text = " ".join(rng.choice(ATTRIBUTES[n].tell).format(v=v) for n, v in now)
        ack = f"Nice to meet you, {told['name']}!" if now[0][0] == "name" else rng.choice(ACKS)
        messages += [user(text), bot(ack)]
    return messages


def ask(rng: Random, name: str, told: Facts) -> list[dict]:
    a = ATTRIBUTES[name]
    answer = a.answer.format(v=told[name]) if name in told else f"I do not know {a.noun}. You have not told me."
    return [user(rng.choice(a.ask)), bot(answer)]


def questions(rng: Random, told: Facts) -> list[list[dict]]:
    """Questions about every fact told, and a few about facts never told."""
    missing = rng.sample([n for n in ATTRIBUTES if n not in told], len(told))
    names = [*told, *(n for n in missing if rng.random() < 0.2)]
    return [ask(rng, n, told) for n in rng.sample(names, len(names))]


def recall(rng: Random, split: str, between: list[dict] | None = None) -> Case:
    """Facts, perhaps something else `between`, then one question about a fact told."""
    told = facts(rng, split, rng.randint(1, 4))
    name = rng.choice(sorted(told))
    if rng.random() < 0.25:  # told and asked in one message
        text = " ".join(rng.choice(ATTRIBUTES[n].tell).format(v=v) for n, v in told.items())
        question, answer = ask(rng, name, told)
        messages = [user(f"{text} {question['content']}"), answer]
    else:
        messages = tell(rng, told) + (between or []) + ask(rng, name, told)
    return Case("recall", messages, want=told[name])


def unknown(rng: Random, split: str) -> Case:
    """A question about a fact that was not told, next to facts that were."""
    told = facts(rng, split, rng.randint(1, 3)) if rng.random() < 0.7 else {}
    name = rng.choice([n for n in sorted(ATTRIBUTES) if n not in told])
    return Case("unknown fact", tell(rng, told) + ask(rng, name, told), want="do not know")


def thinking_recall(rng: Random, split: str) -> Case:
    case = recall(rng, split)
    case.messages[-1]["reasoning_content"] = f"The user told me: {case.want}."
    case.thinking = True
    return case


def people(rng: Random, split: str) -> Case:
    """A short text about several people, and questions in both directions."""

    def make(r: Random) -> tuple:
        names = tuple(dict.fromkeys(words.person(r) for _ in range(r.randint(2, 4))))
        return names, tuple(r.sample(words.THINGS, len(names)))

    names, things = draw(rng, split, make, lambda v: ("people", v))
    verb, past = rng.choice([("has", "have"), ("wants", "want"), ("sees", "see"), ("likes", "like")])
    text = " ".join(f"{n} {verb} {words.article(t)}." for n, t in zip(names, things, strict=True))
    i = rng.randrange(len(names))
    if rng.random() < 0.5:
        question, want = f"Who {verb} the {things[i]}?", names[i]
        answer = f"{names[i]} {verb} the {things[i]}."
    else:
        question, want = f"What does {names[i]} {past}?", things[i]
        answer = f"{names[i]} {verb} {words.article(things[i])}."
    return Case("people", [user(f"{text} {question}"), bot(answer)], want=want)


ECHO = [
    "Repeat after me: {t}", "Say: {t}", "Please repeat: {t}", "Copy this: {t}", 'Say "{t}".', "Say {t}.", "Repeat: {t}",
    "Please say {t}.", "Repeat {t}.", "Write {t}.",
]  # fmt: skip
SAYINGS = "hello goodbye yes no please thanks welcome peace".split()


def echo(rng: Random, split: str) -> Case:
    """Words to be repeated as they are."""
    pools = [words.THINGS, words.ANIMALS, words.FOODS, words.COLOURS, SAYINGS]

    def make(r: Random) -> str:
        count = r.randint(1, 5)
        return " ".join(words.made_up(r) if r.random() < 0.4 else r.choice(r.choice(pools)) for _ in range(count))

    text = draw(rng, split, make, lambda t: ("echo", t)) if rng.random() < 0.8 else words.code(rng)
    return Case("echo", [user(rng.choice(ECHO).format(t=text)), bot(text)], want=text)
