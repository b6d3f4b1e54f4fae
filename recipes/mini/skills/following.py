"""System prompts: a name to go by, words to begin or end with, short answers, facts to answer from."""

from random import Random

from .. import words
from .arithmetic import ADD, addends
from .case import Case, bot, draw, system, user
from .talk import knowledge, small_talk

PREFIXES = "Ahoy! Well, Certainly! Indeed, Aha! Listen: Oh, Yes! Hooray! Attention: Friend,".split()
SUFFIXES = "Arr! Meow! Beep! Cheers! Amen. Over. Wow! Woof! Peace! Yay! Ho ho!".split()
PERSONAS = ["a friendly robot", "an old wizard", "a brave pirate", "a kind teacher",
"a helpful shop assistant",
            "a polite butler", "a happy clown", "a wise owl", "a space captain",
            "a travel guide"]  # fmt: skip
WHO = [
    "Who are you?",
    "What is your name?",
    "Hello! Who are you?",
    "What are you called?",
    "Please introduce yourself.",
]
GOODS = words.THINGS + words.FOODS


def persona(rng: Random, split: str) -> Case:
    name, role = draw(rng, split, lambda r: (words.person(r), r.choice(PERSONAS)), lambda v: ("persona", *v))
    text = rng.choice([f"You are {name}, {role}.", f"Your name is {name}. You are {role}.", f"Play {name}, {role}."])
    return Case("system prompt", [system(text), user(rng.choice(WHO)), bot(f"I am {name}, {role}.")], want=name)


def affix(rng: Random, split: str) -> Case:
    """Every answer begins or ends with given words."""
    turns = [m for _ in range(rng.choice([1, 1, 2, 3])) for m in _base(rng, split).messages]
    begin = rng.random() < 0.5

    def make(r: Random) -> str:
        return r.choice(PREFIXES if begin else SUFFIXES) if r.random() < 0.4 else words.made_up(r).capitalize() + "!"

    word = draw(rng, split, make, lambda w: ("affix", w))
    asks = ["Start every answer with {}", "Begin each answer with {}", "Always say {} first."]
    if not begin:
        asks = ["End every answer with {}", "Finish each answer with {}", "Always say {} at the end."]
    for m in turns:
        if m["role"] == "assistant":
            m["content"] = f"{word} {m['content']}" if begin else f"{m['content']} {word}"
    rule = rng.choice(asks).format(f'"{word}"')
    return Case("system prompt", [system(rule), *turns], want=("starts" if begin else "ends", word))


def one_word(rng: Random, split: str) -> Case:
    rule = rng.choice(
        [
            "Answer with one word only.",
            "Use only one word.",
            "Answer in a single word.",
            "Be as short as possible.",
        ]
    )
    if rng.random() < 0.5:
        a, b = addends(rng, split)
        question, want = rng.choice(ADD).format(a=a, b=b), str(a + b)
    else:
        case = knowledge(rng, split)
        question, want = case.messages[0]["content"], case.want
    return Case("system prompt", [system(rule), user(question), bot(want)], want=("is", want))


def shop(rng: Random, split: str) -> Case:
    """Prices in the system prompt; what is not listed is not sold."""

    def make(r: Random) -> dict[str, int]:
        return {g: r.randint(1, 99) for g in r.sample(GOODS, r.randint(1, 4))}

    prices = draw(rng, split, make, lambda p: ("shop", *p.items()))
    listing = ", ".join(f"{g} {p}" for g, p in prices.items())
    rule = rng.choice(["You work in a shop. Prices: {}.", "You sell things. The prices are: {}.", "Price list: {}."])
    good = rng.choice(sorted(prices)) if rng.random() < 0.8 else rng.choice(GOODS)
    ask = rng.choice([f"What is the price of {good}?", f"How much for {good}?", f"Price of {good}?"])
    known = good in prices
    answer = f"The price of {good} is {prices[good]}." if known else f"I am sorry, we do not have {good}."
    want = str(prices[good]) if known else "do not have"
    return Case("system prompt", [system(rule.format(listing)), user(ask), bot(answer)], want=want)


def about_user(rng: Random, split: str) -> Case:
    """The system prompt knows the user's name."""
    name = draw(rng, split, words.person, lambda n: ("value", n))
    text = rng.choice([f"The user is called {name}.", f"You are talking to {name}.", f"The user's name is {name}."])
    if rng.random() < 0.5:
        turns = [
            user(rng.choice(["What is my name?", "Do you know my name?", "Who am I?"])),
            bot(f"Your name is {name}."),
        ]
    else:
        turns = [
            user(rng.choice(["Hello!", "Hi!", "Good morning!"])),
            bot(f"Hello, {name}! How can I help you?"),
        ]
    return Case("system prompt", [system(text), *turns], want=name)


def follow(rng: Random, split: str) -> Case:
    return rng.choice([persona, affix, affix, one_word, shop, shop, about_user])(rng, split)


def _base(rng: Random, split: str) -> Case:
    kind = rng.randrange(3)
    if kind == 0:
        return small_talk(rng, split)
    if kind == 1:
        return knowledge(rng, split)
    a, b = addends(rng, split)
    return Case("addition", [user(rng.choice(ADD).format(a=a, b=b)), bot(f"{a} + {b} = {a + b}.")])
