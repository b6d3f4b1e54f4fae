"""The vocabulary of the generated world, and words nobody has seen before."""

from random import Random

PEOPLE = """
Ada Adam Agnes Alan Albert Alex Alice Amir Amy Ana Andrew Anna Anton Arthur Astrid Ava Ben Bella Bob Boris
Bruno
Carla Carl Carmen Charlie Chloe Clara Colin Dan Daisy David Dora Edgar Edith Elena Eli Ella Emil Emily Emma
Eric
Erik Esther Eva Eve Felix Finn Fiona Flora Frank Freya Fred Gina George Gloria Grace Greta Gus Hana Hannah
Harry
Hugo Heidi Helen Henry Ida Igor Ines Ingrid Irene Iris Isaac Ivan Ivy Jack Jacob Jane Jasper Jill Jim Joan Joe
John Jonas Jose Julia June Kai Karen Karl Kate Kim Kira Kofi Lara Lars Laura Lea Leo Lena Lewis Liam Lily Lina
Lisa Liv Lola Lucas Lucy Luis Luna Maria Marco Mark Mary Martin Mateo Max Maya Mei Mia Milo Mina Mira Mona
Nadia
Nick Nils Nina Noah Nora Olaf Olga Oliver Olivia Omar Oscar Otto Pablo Paul Paula Pedro Penny Peter Petra Pia
Quinn Rachel Ravi Rita Robert Rosa Rose Ruby Ruth Sam Sara Sean Simon Sofia Sonia Stella Sven Tara Ted Theo
Tim
Tina Tom Tony Toby Uma Ursula Vera Victor Vera Walter Wendy Will Xena Yara Yuki Yusuf Zara Zoe
""".split()
PETS = """
Biscuit Buddy Bubbles Button Clover Cookie Coco Daisy Dot Fluffy Ginger Hazel Honey Jasper Lucky Marble
Mittens
Mocha Muffin Nugget Olive Patch Peanut Pebble Pepper Pickle Pip Rex Rocky Rusty Scout Shadow Smoky Snowy Socks
Sparky Spot Sunny Tiger Toffee Waffle Whiskers Ziggy
""".split()
TOWNS = """
Amsterdam Athens Berlin Bergen Bern Boston Brighton Cairo Chicago Cork Delhi Denver Dublin Florence Geneva
Hamburg
Helsinki Istanbul Jakarta Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Manila Milan Montreal Munich
Nairobi
Naples Oslo Oxford Paris Porto Prague Quito Riga Rome Rotterdam Seattle Seoul Sydney Tallinn Tokyo Toronto
Turin
Uppsala Venice Vienna Warsaw Wellington York Zurich
""".split()
COLOURS = "red blue green yellow orange purple pink brown black white grey golden silver turquoise".split()
ANIMALS = """
cat dog fox bear rabbit mouse duck owl frog horse cow sheep goat pig hen lion tiger monkey elephant turtle
snake
squirrel hedgehog deer wolf penguin parrot donkey whale dolphin crab snail bee ant beaver otter
""".split()
FOODS = """
apples bananas bread cake carrots cheese cherries chocolate cookies curry grapes honey lemons mushrooms
noodles
nuts pancakes pasta peaches pears pizza plums potatoes rice salad soup strawberries sushi tacos tomatoes
waffles
""".split()
DRINKS = "tea coffee milk water juice lemonade cocoa".split()
THINGS = """
ball balloon basket bell bike blanket boat book bottle bowl box bucket camera candle cap chair clock coin
comb cup
doll drum flag flute hammer hat jacket kite key ladder lamp map mirror mug pen pencil phone piano picture
pillow
ring rope scarf ship shoe spoon stone sword tent towel toy train umbrella vase violin wagon whistle
""".split()
COUNTED = """
apples books coins stones shells cards pens stamps marbles eggs flowers cookies pears balls nuts candles
buttons
keys cups leaves tickets stickers
""".split()
JOBS = """
baker builder carpenter cook dancer dentist doctor driver farmer fisher gardener judge lawyer librarian
mechanic
miner nurse painter pilot plumber poet sailor singer soldier tailor teacher waiter writer
""".split()
HOBBIES = """
chess cooking cycling dancing drawing fishing football gardening hiking knitting painting photography reading
running sailing singing skating skiing swimming tennis writing
""".split()
INSTRUMENTS = "piano violin guitar flute drums trumpet cello harp".split()
SPOTS = (
    """
in the drawer|under the bed|on the table|behind the door|in the kitchen|on the shelf|in the car|in the garden
in my bag|under the chair|on the desk|in the cupboard|next to the lamp|in the blue box|on the window sill
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
MONTHS = "January February March April May June July August September October November December".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LANGUAGES = "English French German Spanish Italian Dutch Swedish Polish Greek Turkish Arabic Hindi Japanese".split()
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "England": "London", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Austria": "Vienna", "Poland": "Warsaw", "Greece": "Athens", "Japan": "Tokyo",
    "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa",
    "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana", "Russia": "Moscow", "Hungary": "Budapest",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "old": "young", "up": "down", "day": "night",
    "open": "closed",
    "happy": "sad", "light": "dark", "high": "low", "long": "short", "wet": "dry", "rich": "poor",
    "full": "empty",
    "hard": "soft", "early": "late", "near": "far", "loud": "quiet", "good": "bad", "left": "right",
    "new": "old",
}  # fmt: skip
SOUNDS = {"cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "lion": "roar",
"owl": "hoot",
          "pig": "oink", "bee": "buzz", "frog": "ribbit", "hen": "cluck", "horse": "neigh"}  # fmt: skip
LOOKS = {"the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "coal": "black",
         "a tomato": "red", "a carrot": "orange", "milk": "white", "chocolate": "brown"}  # fmt: skip
LEGS = {"a dog": "four", "a cat": "four", "a spider": "eight", "a bee": "six", "an ant": "six",
"a hen": "two",
        "a horse": "four", "a snake": "no", "a duck": "two", "a cow": "four", "a person": "two"}  # fmt: skip

_ONSETS = "b c d f g h j k l m n p r s t v w z br dr gr kr st tr pl sh th".split()
_VOWELS = "a e i o u a e i o ai ea ou".split()
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "t", "k"]


def made_up(rng: Random) -> str:
    """A pronounceable word that most likely is none: it must be copied, it cannot be known."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def person(rng: Random) -> str:
    return rng.choice(PEOPLE) if rng.random() < 0.7 else made_up(rng).capitalize()


def pet(rng: Random) -> str:
    return rng.choice(PETS) if rng.random() < 0.7 else made_up(rng).capitalize()


def town(rng: Random) -> str:
    return rng.choice(TOWNS) if rng.random() < 0.7 else made_up(rng).capitalize()


def code(rng: Random) -> str:
    """A number of three to five digits, to be copied digit by digit."""
    return "".join(rng.choice("0123456789") for _ in range(rng.randint(3, 5)))


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
