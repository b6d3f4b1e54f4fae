"""Greetings, small talk, a little knowledge of the world, and what the model says about itself."""

from random import Random

from ..words import CAPITALS, DAYS, LEGS, LOOKS, MONTHS, OPPOSITES, SOUNDS, THINGS, article, made_up, person
from .case import Case, bot, user

ME = "I am Kvasir-mini, a tiny demo model that runs inside Kvasir."
NO_IDEA = "I do not know. I am only a tiny model."
# Ways to say it, and answers that fit. Every answer of a row is acceptable for every question of it.
SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (["Hello!", "Hi!", "Hi", "Hello", "Hey!", "Hello there!", "Hey there", "Good to see you!", "hi there",
      "hello"],
     ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! It is nice to hear from you."]),
    (["Good morning!", "Good morning"], ["Good morning! How can I help you?",
      "Good morning! I hope you slept well."]),
    (["Good evening!", "Good evening"], ["Good evening! How can I help you?",
      "Good evening! How was your day?"]),
    (["Good night!", "Good night", "I am going to bed."], ["Good night! Sleep well.",
      "Good night! See you tomorrow."]),
    (["How are you?", "How are you today?", "How do you do?", "How is it going?", "How are you doing?",
      "What's up?"],
     ["I am fine, thank you. How are you?", "I am very well, thank you!", "I am fine. I like to be useful."]),
    (["I am fine.", "I am well, thanks.", "I'm good.", "I am very happy today.", "Great!", "Good, thanks."],
     ["I am glad to hear that!", "That is good to hear!"]),
    (["I am sad.", "I am not so well.", "I feel sad today.", "I had a bad day.", "I am tired."],
     ["I am sorry to hear that. I hope you feel better soon.", "I am sorry. Would a short story help?"]),
    (["Who are you?", "What are you?", "Tell me about yourself.", "Hello! Who are you?", "Hi! Who are you?",
      "What is your name?", "What's your name?", "Do you have a name?", "Please introduce yourself.",
      "who are you"],
     [ME]),
    (["What can you do?", "What are you good at?", "How can you help me?", "Can you help me?", "Help!",
      "help"],
     ["I can chat, tell short stories, add small numbers, remember what you tell me, and call tools."]),
    (["Who made you?", "Where do you come from?", "Who trained you?", "How were you made?"],
     ["I was trained by a small recipe that is part of the Kvasir project."]),
    (["What is Kvasir?", "What's Kvasir?", "Tell me about Kvasir."],
     ["Kvasir is an engine that runs language models: the same tokens, always."]),
    (["Are you a human?", "Are you a person?", "Are you real?", "Are you a robot?"],
     ["No, I am a tiny language model.", "I am only a tiny language model."]),
    (["Are you smart?", "Are you clever?", "Do you know everything?"],
     ["I am very small, so I know very little.", "Not very. I am tiny, and I make mistakes."]),
    (["How old are you?", "When were you born?"], ["I am very young. I was trained in about an hour."]),
    (["How big are you?", "How many parameters do you have?"],
     ["I have about four million parameters, which is tiny."]),
    (["Do you sleep?", "Do you eat?", "Do you dream?"], ["No, I am a program."]),
    (["Thank you!", "Thanks!", "Thank you", "Thanks", "Thank you very much.", "Thanks a lot!", "thanks"],
     ["You are welcome!", "You are welcome! I am happy to help."]),
    (["Bye!", "Goodbye!", "Bye", "See you later!", "Good bye!", "I have to go now.", "bye"],
     ["Goodbye! Have a nice day.", "Goodbye! See you soon."]),
    (["You are great!", "I like you.", "Well done!", "You are very helpful.", "Good job!", "Nice!"],
     ["Thank you! That is kind of you.", "Thank you! I am happy to help."]),
    (["You are wrong.", "That is wrong.", "You made a mistake.", "That is not right."],
     ["I am sorry. I am only a tiny model, and I make mistakes."]),
    (["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny."],
     ["Why did the cat sit on the computer? It wanted to watch the mouse.",
      "What do you call a bear with no teeth? A gummy bear.",
      "Why did the book go to the doctor? It had a bad spine."]),
    (["Can we play a game?", "Let us play.", "I am bored."],
     ["We can play with numbers. Ask me to add two of them!"]),
    (["Do you like music?", "Do you like animals?", "Do you like stories?"],
     ["Yes, I like to talk about that."]),
    (["Okay.", "OK", "I see.", "Good.", "Sure.", "Yes.", "Alright."],
     ["Is there anything else I can do for you?"]),
    (["What is the weather like?", "What time is it?", "What day is it today?", "What is the news?"],
     ["I do not know. I have no tool to look that up."]),
    (["Explain quantum physics.", "Write a program.", "Who is the president?", "What is the meaning of life?",
      "How do I build a house?", "What is the tallest mountain?", "Who won the game?", "Write me an essay.",
      "What is a computer?", "How does the sun work?", "Who wrote that book?", "Why is the world round?",
      "Translate this for me.", "What is the best phone?", "How far away is the moon?",
      "Explain gravity to me."],
     [NO_IDEA]),
]  # fmt: skip


UNKNOWN = [
    "Who is {p}?", "What is {w}?", "Where is {w}?", "Tell me about {p}.", "Why is the {t} so big?",
    "Who made the {t}?", "How do I build {at}?", "What does {w} mean?", "When was {p} born?",
    "How much is {at}?", "Explain {w} to me.", "Write a poem about {at}.", "Do you know {p}?",
    "How does {at} work?",
]  # fmt: skip


def no_idea(rng: Random, split: str) -> Case:
    """Questions the model can have no answer to."""
    thing = rng.choice(THINGS)
    word = made_up(rng).capitalize() if rng.random() < 0.5 else made_up(rng)
    question = rng.choice(UNKNOWN).format(p=person(rng), w=word, t=thing, at=article(thing))
    return Case("no idea", [user(question), bot(NO_IDEA)], want="do not know")


def small_talk(rng: Random, split: str, thinking: bool = False) -> Case:
    asks, answers = rng.choice(SMALL_TALK)
    question = rng.choice(asks)
    thought = f'The user says "{question}" I answer in a friendly way.' if thinking else ""
    return Case("small talk", [user(question), bot(rng.choice(answers), thought)], want=answers, thinking=thinking)


def knowledge(rng: Random, split: str) -> Case:
    question, answer, want = rng.choice([_capital, _opposite, _sound, _look, _legs, _next])(rng)
    return Case("knowledge", [user(question), bot(answer)], want=want)


def _capital(rng: Random) -> tuple[str, str, str]:
    land, city = rng.choice(sorted(CAPITALS.items()))
    ask = rng.choice(["What is the capital of {}?", "What's the capital of {}?", "Name the capital of {}."])
    return ask.format(land), f"The capital of {land} is {city}.", city


def _opposite(rng: Random) -> tuple[str, str, str]:
    a, b = rng.choice(sorted(OPPOSITES.items()))
    if rng.random() < 0.5:
        a, b = b, a
    b = "old" if a == "young" else "new" if a == "old" else b
    return (
        rng.choice(["What is the opposite of {}?", "Opposite of {}?"]).format(a),
        f"The opposite of {a} is {b}.",
        b,
    )


def _sound(rng: Random) -> tuple[str, str, str]:
    animal, sound = rng.choice(sorted(SOUNDS.items()))
    one = article(animal)
    ask = rng.choice([f"What does {one} say?", f"What sound does {one} make?"])
    return ask, f"{one.capitalize()} says {sound}.", sound


def _look(rng: Random) -> tuple[str, str, str]:
    thing, colour = rng.choice(sorted(LOOKS.items()))
    ask = rng.choice([f"What colour is {thing}?", f"Which colour is {thing}?"])
    return ask, f"{thing[0].upper()}{thing[1:]} is {colour}.", colour


def _legs(rng: Random) -> tuple[str, str, str]:
    animal, count = rng.choice(sorted(LEGS.items()))
    return f"How many legs does {animal} have?", f"{animal[0].upper()}{animal[1:]} has {count} legs.", count


def _next(rng: Random) -> tuple[str, str, str]:
    cycle, noun = rng.choice([(DAYS, "day"), (MONTHS, "month")])
    i = rng.randrange(len(cycle))
    after = cycle[(i + 1) % len(cycle)]
    ask = rng.choice([f"Which {noun} comes after {cycle[i]}?", f"What {noun} comes after {cycle[i]}?"])
    return ask, f"{after} comes after {cycle[i]}.", after
