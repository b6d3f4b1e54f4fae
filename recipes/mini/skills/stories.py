"""Short stories from a few plots: a hero, a wish or a trouble, a friend, an end."""

from random import Random

from ..words import ANIMALS, THINGS, article
from .case import Case, bot, user

# Few names, and different ones for hero and friend, so that even the likeliest words make two persons.
HEROES = "Anna Ben Coco Daisy Emma Felix Lily Luna Max Mia Oscar Pip Rosa Sam Teddy Toby".split()
FRIENDS = "Bruno Clover Dot Ella Finn Hazel Ida Leo Nora Otto Ruby Zoe".split()
ADJECTIVES = "little small big old young brave shy kind clever funny happy lonely curious gentle quiet".split()
PLACES = (
    """
a green forest|a small town|a quiet village|a house by the sea|an old farm|a big garden|a castle on a hill
a tree house|a cave near the river|a red barn|a valley of flowers|an island|a snowy mountain
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
SPOTS = "by the river|under a tree|in the tall grass|behind the house|on the hill|at the market|near the lake".split(
    "|"
)
WEATHER = "sunny windy rainy snowy warm cold bright cloudy".split()
FEELINGS = "happy proud glad full of joy".split(" ", 3)
ASK = [
    "Tell me a story about {h}.", "Tell me a short story about {h}.", "Please tell me a story about {h}.",
    "Write a short story about {h}.", "Can you tell me a story about {h}?", "I want a story about {h}.",
    "Write a story about {h}.", "tell me a short story about {h}",
]  # fmt: skip
ASK_ANY = [
    "Tell me a story.",
    "Tell me a short story.",
    "Please tell me a story.",
    "Write a story.",
    "A story, please.",
]


def story(rng: Random, split: str) -> Case:
    hero = rng.choice(ANIMALS) if rng.random() < 0.75 else rng.choice(["boy", "girl", "robot", "dragon", "king"])
    wants_thing = rng.random() < 0.25
    thing = rng.choice(THINGS)
    ask = rng.choice(ASK if rng.random() < 0.85 or wants_thing else ASK_ANY)
    subject = article(hero) + (f" and {article(thing)}" if wants_thing else "")
    text, name = tell_story(rng, hero, thing)
    return Case(
        "story",
        [user(ask.format(h=subject)), bot(text)],
        want={"hero": hero if ask in ASK else "", "name": name, "kind": hero},
    )


def story_and_question(rng: Random, split: str) -> Case:
    """A story, then a question about the hero's name."""
    case = story(rng, split)
    hero, name = case.want["kind"], case.want["name"]
    question = rng.choice([f"What was the {hero}'s name?", f"What was the {hero} called?"])
    messages = [*case.messages, user(question), bot(f"The {hero} was called {name}.")]
    return Case("story question", messages, want=name)


def tell_story(rng: Random, hero: str, thing: str) -> tuple[str, str]:
    """The text of a story and its hero's name."""
    name = rng.choice(HEROES)
    friend_kind = rng.choice([a for a in ANIMALS if a != hero])
    she = rng.choice(["he", "she"])
    slots = {
        "n": name, "h": hero, "t": thing, "at": article(thing), "f": friend_kind, "af": article(friend_kind),
        "fn": rng.choice(FRIENDS), "s": she, "S": she.capitalize(),
        "o": {"he": "him", "she": "her"}[she], "p": {"he": "his",
        "she": "her"}[she], "spot": rng.choice(SPOTS),
        "place": rng.choice(PLACES), "w": rng.choice(WEATHER), "feel": rng.choice(FEELINGS),
    }  # fmt: skip
    a, b = rng.sample(ADJECTIVES, 2)
    slots |= {"a": article(f"{a} {hero}"), "b": b}
    lines = [rng.choice(line) for line in [rng.choice(OPENINGS), *rng.choice(PLOTS), ENDS]]
    return " ".join(lines).format(**slots), name


OPENINGS = [
    [
        "Once upon a time there was {a} called {n}.",
        "Once there was {a} called {n}.",
        "There once was {a} called {n}.",
    ],
    [
        "{n} was {a} who lived in {place}.",
        "In {place} lived {a} called {n}.",
        "Long ago, {a} called {n} lived in {place}.",
    ],
]
ENDS = [
    "{S} was very {feel}.", "That night {n} slept very well.", "And from then on they were best friends.",
    "It was the best day of all.", "{n} smiled all the way home.", "{n} never forgot that day.",
]  # fmt: skip
PLOTS = [
    [  # something is lost and found
        ["One {w} day {n} lost {p} {t}.", "One morning {p} {t} was gone.",
         "{n} had {at}, but one day it was lost."],
        ["{S} looked {spot}, but it was not there.", "{S} looked everywhere and felt sad."],
        ["Then {af} called {fn} came by and asked what was wrong.",
         "{fn} the {f} saw {o} and wanted to help."],
        ["Together they found the {t} {spot}.", "They looked together, and there was the {t}, {spot}."],
        ['"Thank you, {fn}!" said {n}.', '"You are a good friend," said {n}.'],
    ],
    [  # a new friend
        ["{n} had no friends and often felt alone.", "{n} wanted to find a friend."],
        ["One {w} day {s} went for a walk {spot}.", "On a {w} morning {n} sat {spot}."],
        ["There {s} met {af} called {fn}.", "Then {af} called {fn} said hello."],
        ["{fn} wanted to play with the {t}, and so did {n}.", "They played with {at} until it was dark."],
        ['"Will you come back tomorrow?" asked {fn}. "Yes!" said {n}.', '"I like you," said {fn}. {n} liked {fn} too.'],
    ],
    [  # fear overcome
        ["{n} was afraid of the dark.", "{n} was afraid of the water.", "{n} was afraid of loud noises."],
        ["One {w} night {s} heard a strange sound {spot}.", "One day there was a strange noise {spot}."],
        ["{S} took {p} {t} and went to look.", "{S} wanted to run away, but {s} held {p} {t} and looked."],
        ["It was only {af} called {fn} who was lost.", "There sat {fn}, {af}, who was even more afraid."],
        ["{n} brought {fn} home and was not afraid any more.", '"Do not cry," said {n}. "I will help you."'],
    ],
    [  # sharing
        ["{n} found {at} {spot}.", "One {w} day {n} got a new {t}."],
        ["{S} did not want to share it.", '"It is all mine," said {n}.'],
        ["But it was no fun to play alone.", "Soon {s} was alone with the {t} and felt sad."],
        ["So {s} asked {fn} the {f} to play.", "Then {n} gave the {t} to {fn}, {af}."],
        ["They took turns and laughed a lot.", "Now both of them had fun."],
    ],
    [  # helping in bad weather
        ["One day a big storm came.", "One {w} day the wind was very strong."],
        ["{n} saw {af} called {fn} sitting {spot}, all wet.", "{fn} the {f} had lost the way home."],
        ['"Come in, my house is warm," said {n}.', "{n} took {fn} home."],
        ["They drank hot milk and looked at {p} {t}.", "{S} gave {fn} some soup and {at}."],
        ["When the sun came out, {fn} went home and waved.", "In the morning the sky was blue again."],
    ],
    [  # learning something
        ["{n} wanted to learn how to sing.", "{n} wanted to learn how to swim.", "{n} wanted to build {at}."],
        ["At first it went wrong every time.", "It was hard, and {s} almost gave up."],
        ['"Try again," said {fn} the {f}.', "{fn}, {af}, showed {o} how to do it."],
        ["{n} tried every day {spot}.", "Day after day {s} tried again."],
        ["And then one {w} day it worked!", "At last {s} could do it."],
    ],
]  # fmt: skip
