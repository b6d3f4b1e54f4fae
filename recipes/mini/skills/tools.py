"""Tools described in the prompt: calling the right one with the right arguments, and using its result."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from .. import words
from .arithmetic import addition
from .case import Case, bot, draw, user
from .talk import knowledge, small_talk


@dataclass(frozen=True)
class Tool:
    """A function, requests that call for it, and what is said about its result."""

    kind: str  # its name, unless `name` gives another
    about: str
    params: dict[str, str]  # name to JSON type
    asks: list[str]
    args: Callable[[Random], dict[str, Any]]
    result: Callable[[Random], Any]
    report: str
    name: str = ""
    shown: dict[str, str] = field(default_factory=dict)  # parameters that go by another name in the schema
    extra: dict[str, dict] = field(default_factory=dict)  # properties beyond those required
    described: bool = False

    def schema(self) -> dict:
        props = {self.shown.get(k, k): self._property(k, t) for k, t in self.params.items()}
        parameters = {"type": "object", "properties": props | self.extra, "required": list(props)}
        function = {"name": self.name or self.kind, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": function}

    def _property(self, param: str, kind: str) -> dict:
        return {"type": kind} | ({"description": f"The {param}"} if self.described else {})

    def call(self, args: dict[str, Any]) -> dict[str, Any]:
        """Name and arguments of a call, as the schema has them."""
        arguments = {self.shown.get(k, k): v for k, v in args.items()}
        return {"name": self.name or self.kind, "arguments": arguments}


def _number(rng: Random) -> int:
    return rng.randint(1, 99)


TOOLS = [
    Tool("get_weather", "Get the weather of a city", {"city": "string"},
         ["What is the weather in {city}?", "How is the weather in {city}?", "Is it raining in {city}?",
          "Tell me the weather in {city}.", "What's the weather like in {city}?"],
         lambda r: {"city": words.town(r)},
         lambda r: {"weather": r.choice(["sunny", "rainy", "windy", "cloudy"]), "degrees": r.randint(0, 35)},
         "In {city} it is {weather} with {degrees} degrees."),
    Tool("get_time", "Get the time in a city", {"city": "string"},
         ["What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"],
         lambda r: {"city": words.town(r)},
         lambda r: {"time": f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"}, "It is {time} in {city}."),
    Tool("add", "Add two numbers", {"a": "integer", "b": "integer"},
         ["Add {a} and {b}.", "What is {a} + {b}?", "How much is {a} plus {b}?"],
         lambda r: {"a": r.randint(0, 999), "b": r.randint(0, 999)}, lambda r: None, "The result is {result}."),
    Tool("multiply", "Multiply two numbers", {"a": "integer", "b": "integer"},
         ["Multiply {a} by {b}.", "What is {a} times {b}?", "How much is {a} * {b}?"],
         lambda r: {"a": r.randint(0, 99), "b": r.randint(0, 99)}, lambda r: None, "The result is {result}."),
    Tool("send_message", "Send a message to a person", {"to": "string", "text": "string"},
         ["Send {to} a message: {text}", "Write to {to}: {text}", "Message {to} saying {text}",
          "Tell {to} this: {text}"],
         lambda r: {"to": words.person(r), "text": _phrase(r)}, lambda r: {"status": "sent"},
         "I have sent the message to {to}."),
    Tool("set_alarm", "Set an alarm", {"hour": "integer", "minute": "integer"},
         ["Set an alarm for {hour}:{minute}.", "Wake me up at {hour}:{minute}.",
          "I need an alarm at {hour}:{minute}."],
         lambda r: {"hour": r.randint(0, 23), "minute": r.randint(10, 59)}, lambda r: {"status": "ok"},
         "The alarm is set for {hour}:{minute}."),
    Tool("play_music", "Play a song", {"song": "string"},
         ["Play {song}.", "Please play the song {song}.", "I want to hear {song}."],
         lambda r: {"song": words.made_up(r).capitalize()}, lambda r: {"status": "playing"}, "{song} is playing now."),
    Tool("search", "Search the web", {"query": "string"},
         ["Search for {query}.", "Look up {query}.", "Find {query} on the web."],
         lambda r: {"query": _phrase(r)}, lambda r: {"found": _number(r)}, "I found {found} pages about {query}."),
    Tool("get_price", "Get the price of a product", {"product": "string"},
         ["How much does the {product} cost?", "What is the price of the {product}?",
          "Price of the {product}?"],
         lambda r: {"product": r.choice(words.THINGS)}, lambda r: {"price": _number(r)}, "The {product} costs {price}."),
    Tool("order", "Order a product", {"product": "string", "count": "integer"},
         ["Order {count} {product}.", "Please buy {count} {product}.", "I need {count} {product}."],
         lambda r: {"product": r.choice(words.COUNTED + words.FOODS), "count": _number(r)},
         lambda r: {"status": "ordered"}, "I have ordered {count} {product}."),
    Tool("turn_on", "Turn a device on", {"device": "string"},
         ["Turn on the {device}.", "Switch on the {device}.", "Turn the {device} on, please."],
         lambda r: {"device": r.choice(words.THINGS)}, lambda r: {"status": "on"}, "The {device} is on now."),
    Tool("get_age", "Get the age of a person", {"name": "string"},
         ["How old is {name}?", "What is the age of {name}?", "Tell me how old {name} is."],
         lambda r: {"name": words.person(r)}, lambda r: {"age": _number(r)}, "{name} is {age} years old."),
    Tool("translate", "Translate a text", {"text": "string", "language": "string"},
         ["Translate {text} into {language}.", "What is {text} in {language}?",
          "How do you say {text} in {language}?"],
         lambda r: {"text": _phrase(r), "language": r.choice(words.LANGUAGES)},
         lambda r: {"translation": words.made_up(r)}, "In {language} that is {translation}."),
    Tool("book_table", "Book a table", {"name": "string", "people": "integer", "day": "string"},
         ["Book a table for {people} on {day}, the name is {name}.",
          "A table for {people} on {day} for {name}, please."],
         lambda r: {"name": words.person(r), "people": r.randint(1, 12), "day": r.choice(words.DAYS)},
         lambda r: {"status": "booked"}, "A table for {people} on {day} is booked for {name}."),
]  # fmt: skip


def _phrase(rng: Random) -> str:
    pools = [words.THINGS, words.ANIMALS, words.FOODS, words.COLOURS, words.JOBS]
    return " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 3)))


def invented(rng: Random) -> Tool:
    """A tool nobody has seen: its name, its parameters and the request name each other."""
    verb = rng.choice("open close get find show start stop check read delete make move".split())
    noun = rng.choice(words.THINGS) if rng.random() < 0.5 else words.made_up(rng)
    pool = ["id", "name", "size", "place", "owner", "code", "level", "date", words.made_up(rng)]
    params = {p: rng.choice(["string", "integer"]) for p in rng.sample(pool, rng.randint(1, 2))}
    phrase = " and ".join(f"{p} {{{p}}}" for p in params)

    def args(r: Random) -> dict[str, Any]:
        return {p: r.randint(0, 999) if t == "integer" else r.choice([words.person(r), words.made_up(r)])
                for p, t in params.items()}  # fmt: skip

    asks = [f"{verb.capitalize()} the {noun} with {phrase}.", f"Please {verb} the {noun} with {phrase}."]
    about = f"{verb.capitalize()} the {noun}"
    return Tool(f"{verb}_{noun}", about, params, asks, args, lambda r: {"status": "ok"}, "Done.")


OTHER_NAMES = {
    "city": "location place town", "a": "x first left", "b": "y second right", "to": "recipient person contact",
    "text": "message body content", "song": "title track", "query": "q keywords topic", "product": "item article",
    "count": "quantity amount number", "device": "target machine", "name": "person who", "day": "date when",
    "language": "lang target_language", "people": "guests seats", "hour": "h", "minute": "min",
    "get_weather": "weather get_current_weather fetch_weather", "get_time": "time current_time", "add": "sum plus",
    "multiply": "times product", "send_message": "message send write_to", "set_alarm": "alarm wake_up",
    "play_music": "play play_song", "search": "web_search search_web look_up", "get_price": "price fetch_price",
    "order": "buy order_item", "turn_on": "switch_on", "get_age": "age age_of", "translate": "translate_text",
    "book_table": "book reserve_table",
}  # fmt: skip
EXTRAS = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "limit": {"type": "integer"},
    "verbose": {"type": "boolean"},
}


def variant(rng: Random, tool: Tool) -> Tool:
    """The same tool as another author would have declared it."""

    def other(name: str) -> str:
        return rng.choice(OTHER_NAMES[name].split()) if rng.random() < 0.4 else name

    extra = {k: EXTRAS[k] for k in rng.sample(sorted(EXTRAS), 1) if rng.random() < 0.15}
    shown = {k: other(k) for k in tool.params}
    return replace(tool, name=other(tool.kind), shown=shown, extra=extra, described=rng.random() < 0.25)


def offer(rng: Random, num: int) -> list[Tool]:
    """Different tools, some of them invented."""
    tools = [invented(rng) if rng.random() < 0.3 else variant(rng, t) for t in rng.sample(TOOLS, num)]
    return list({t.name or t.kind: t for t in tools}.values())


def calling(tool: Tool, args: dict, thought: str = "") -> dict:
    """The message that calls a tool."""
    made = tool.call(args)
    function = made | {"arguments": json.dumps(made["arguments"], ensure_ascii=False)}
    return bot("", thought) | {"tool_calls": [{"type": "function", "function": function}]}


def request(rng: Random, split: str, tool: Tool) -> tuple[str, dict]:
    """What a user says to get the tool called, and the arguments of that call."""
    known = tool.kind in OTHER_NAMES
    args = draw(rng, split, tool.args, lambda a: ("tool", tool.kind if known else "", *a.values()))
    return rng.choice(tool.asks).format(**args), args


def report(rng: Random, tool: Tool, args: dict) -> list[dict]:
    """The result of a call, and the sentence about it."""
    result = tool.result(rng)
    if result is None:
        result = {"result": args["a"] + args["b"] if tool.kind == "add" else args["a"] * args["b"]}
    return [{"role": "tool", "content": json.dumps(result)}, bot(tool.report.format(**args, **result))]


def tool_call(rng: Random, split: str, thinking: bool = False) -> Case:
    offered = offer(rng, rng.choice([1, 1, 2, 2, 3]))
    chosen = rng.choice(offered)
    question, args = request(rng, split, chosen)
    thought = f"I need the tool {chosen.name or chosen.kind}." if thinking else ""
    messages = [user(question), calling(chosen, args, thought)]
    want = chosen.call(args)
    return Case("tool call", messages, want=want, tools=schemas(offered), thinking=thinking)


def tool_result(rng: Random, split: str, turns: int = 1) -> Case:
    """Calls, their results, and the sentences about them, `turns` times."""
    offered = offer(rng, rng.choice([1, 1, 2, 2, 3]))
    messages: list[dict] = []
    for _ in range(turns):
        chosen = rng.choice(offered)
        question, args = request(rng, split, chosen)
        messages += [user(question), calling(chosen, args), *report(rng, chosen, args)]
        if turns > 1 and rng.random() < 0.3:
            messages += small_talk(rng, split).messages
    return Case("tool result", messages, want=messages[-1]["content"], tools=schemas(offered))


def schemas(tools: list[Tool]) -> list[dict]:
    return [t.schema() for t in tools]


def no_tool(rng: Random, split: str) -> Case:
    """Tools are there, but the message needs none of them."""
    offered = [t for t in offer(rng, rng.randint(1, 3)) if t.kind != "add"]
    make = rng.choice([small_talk, small_talk, knowledge, addition]) if offered else small_talk
    case = make(rng, split)
    case.tools = schemas(offered) or None
    case.skill = "no tool"
    return case
