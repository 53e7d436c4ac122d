"""The tools of the skill `calling`: what is offered, how a user asks for each, and what comes of a result.

Owns tools, lists of values and which values are kept for the test. Draws no examples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.tiny.wording import NAMES, invented_name

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function with its parameters (name to JSON type), the wordings that ask for it, and its result in words.

    `values(rng, unseen)` draws arguments, of the kept ones if `unseen`; `result(rng)` is what the tool answers; `told`
    is the sentence that says so, filled from arguments and result.
    """

    name: str
    description: str
    parameters: Mapping[str, str]
    asked: tuple[str, ...]
    values: Callable[[random.Random, bool], Values]
    result: Callable[[random.Random], Values]
    told: str
    weight: int = 1  # how often it is drawn, beside others

    @property
    def function(self) -> Mapping[str, Any]:
        """The tool in OpenAI's form."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        schema = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def words(text: str) -> tuple[str, ...]:
    """The words of a text, with + for a space inside of one."""
    return tuple(word.replace("+", " ") for word in text.split())


CITIES_TEXT = """
Oslo Paris London Rome Berlin Tokyo Madrid Vienna Cairo Lima Delhi Seoul Dublin Lagos Osaka Milan Prague Lyon Bern Basel
Athens Boston Chicago Denver Dallas Miami Moscow Beijing Shanghai Hanoi Manila Nairobi Accra Tunis Quito Bogota Havana Riga
"""
CITIES = words(CITIES_TEXT)
UNSEEN_CITIES_TEXT = "Lisbon Warsaw Naples Geneva Toronto Kyoto Cracow Tallinn"
UNSEEN_CITIES = words(UNSEEN_CITIES_TEXT)
VERBS = words("buy call wash paint find fix sell move clean open send read bring check")
UNSEEN_VERBS = words("close write")
THINGS_TEXT = """
milk bread the+car the+door the+bike the+letter the+book apples the+table the+roof shoes the+lamp the+garden flowers
the+bank the+kitchen rice a+ticket the+phone paper the+window
"""
THINGS = words(THINGS_TEXT)
UNSEEN_THINGS = words("eggs the+chair the+boat")
TOPICS_TEXT = """
cheap+flights old+books red+shoes train+times good+coffee blue+cars small+houses fresh+bread new+films green+tea warm+coats
fast+bikes used+phones long+novels quiet+hotels open+shops free+music night+trains hot+soup wooden+toys
"""
TOPICS = words(TOPICS_TEXT)
UNSEEN_TOPICS = words("cheap+shoes old+trains blue+coats good+hotels")
LANGUAGES = words("German French Spanish Italian Chinese Japanese Russian Dutch Polish Greek")
CURRENCIES = words("EUR USD JPY GBP CNY CHF SEK INR")
ROOMS_TEXT = "kitchen bathroom bedroom hall garage cellar office garden attic living+room"
ROOMS = words(ROOMS_TEXT)
UNSEEN_ROOMS = words("dining+room workshop")
PHRASES_TEXT = """
good+morning thank+you my+friend a+red+house the+old+tree I+am+here where+is+the+station the+sea+is+blue a+small+dog
see+you+tomorrow I+like+tea the+door+is+open a+glass+of+water the+train+is+late we+are+at+home
"""
PHRASES = words(PHRASES_TEXT)
UNSEEN_PHRASES = words("a+small+house the+door+is+blue I+am+late my+old+dog")
LEXICON = tuple(sorted({word for text in (*VERBS, *THINGS, *TOPICS, *ROOMS, *PHRASES) for word in text.split()}))
KEPT = (*UNSEEN_VERBS, *UNSEEN_THINGS, *UNSEEN_TOPICS, *UNSEEN_ROOMS, *UNSEEN_PHRASES)
NONSENSE = {"text": (2, 4), "query": (2, 3), "room": (1, 2)}  # of which arguments, with how many words
SHARE_OF_NONSENSE = 0.4
SHARE_OF_NO_WORDS = 0.4
SKIES = words("sunny cloudy rainy windy")


def taught_values(rng: random.Random, tool: Tool) -> Values:
    """Arguments as they are taught: texts are nonsense now and then, since who says that again has read it."""
    return {
        name: nonsense(rng, *NONSENSE[name]) if name in NONSENSE and rng.random() < SHARE_OF_NONSENSE else value
        for name, value in tool.values(rng, False).items()
    }


def nonsense(rng: random.Random, fewest: int, most: int) -> str:
    """So many words, some of them invented, in any order; none of what is kept is among them."""
    while True:
        drawn = [
            invented_name(rng).lower() if rng.random() < SHARE_OF_NO_WORDS else rng.choice(LEXICON)
            for _ in range(rng.randint(fewest, most))
        ]
        text = f" {' '.join(drawn)} "
        if not any(f" {kept} " in text for kept in KEPT):
            return text.strip()


def city(rng: random.Random, unseen: bool) -> Values:
    """A city, in the training one time in three an invented one."""
    if unseen:
        return {"city": rng.choice(UNSEEN_CITIES)}
    return {"city": rng.choice(CITIES) if rng.random() < 0.65 else invented_name(rng)}


def minutes(rng: random.Random, unseen: bool) -> Values:
    """Minutes, those that end with 7 kept for the test."""
    while ((drawn := rng.randint(2, 99)) % 10 == 7) != unseen:
        pass
    return {"minutes": drawn}


def chore(rng: random.Random, unseen: bool) -> str:
    """Something to do, such as "wash the car"."""
    if unseen:
        return f"{rng.choice(UNSEEN_VERBS)} {rng.choice(THINGS + UNSEEN_THINGS)}"
    return f"{rng.choice(VERBS)} {rng.choice(THINGS)}" if rng.random() < 0.8 else f"call {rng.choice(NAMES)}"


def note(rng: random.Random, unseen: bool) -> Values:
    """The text of a note."""
    return {"text": chore(rng, unseen)}


def message(rng: random.Random, unseen: bool) -> Values:
    """Who gets which text."""
    return {"name": rng.choice(NAMES) if rng.random() < 0.6 else invented_name(rng), "text": chore(rng, unseen)}


def query(rng: random.Random, unseen: bool) -> Values:
    """What is looked for."""
    if unseen:
        return {"query": rng.choice(UNSEEN_TOPICS)}
    return {"query": rng.choice(TOPICS) if rng.random() < 0.75 else invented_name(rng)}


def money(rng: random.Random, unseen: bool) -> Values:
    """An amount and two different currencies; amounts that end with 7 are kept for the test."""
    while ((amount := rng.randint(2, 999)) % 10 == 7) != unseen:
        pass
    source, target = rng.sample(CURRENCIES, 2)
    return {"amount": amount, "from": source, "to": target}


def translation(rng: random.Random, unseen: bool) -> Values:
    """A phrase and a language."""
    return {"text": rng.choice(UNSEEN_PHRASES if unseen else PHRASES), "language": rng.choice(LANGUAGES)}


def room(rng: random.Random, unseen: bool) -> Values:
    """A room."""
    return {"room": rng.choice(UNSEEN_ROOMS if unseen else ROOMS)}


def done(rng: random.Random) -> Values:
    """A result that says nothing but that it was done."""
    return {"ok": True}


TOOLS = (
    Tool(
        name="get_weather",
        description="The weather in a city.",
        parameters={"city": "string"},
        asked=(
            "What is the weather in {city}?",
            "How is the weather in {city}?",
            "Weather in {city}?",
            "Tell me the weather in {city}.",
            "{city} 的天气怎么样？",
        ),
        values=city,
        result=lambda rng: {"degrees": rng.randint(-9, 39), "sky": rng.choice(SKIES)},
        told="It is {degrees} degrees and {sky} in {city}.",
    ),
    Tool(
        name="get_time",
        description="The time in a city.",
        parameters={"city": "string"},
        asked=(
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Time in {city}?",
            "Tell me the time in {city}.",
            "{city} 现在几点？",
        ),
        values=city,
        result=lambda rng: {"time": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
        told="It is {time} in {city}.",
    ),
    Tool(
        name="set_timer",
        description="Sets a timer.",
        parameters={"minutes": "integer"},
        asked=(
            "Set a timer for {minutes} minutes.",
            "Wake me in {minutes} minutes.",
            "Start a timer of {minutes} minutes.",
            "A timer for {minutes} minutes, please.",
            "请设 {minutes} 分钟的定时器。",
        ),
        values=minutes,
        result=done,
        told="The timer is set to {minutes} minutes.",
    ),
    Tool(
        name="add_note",
        description="Saves a note.",
        parameters={"text": "string"},
        asked=("Note: {text}", "Add a note: {text}", "Write down: {text}", "Save the note: {text}", "请记下: {text}"),
        values=note,
        result=done,
        told="The note is saved: {text}",
    ),
    Tool(
        name="send_message",
        description="Sends a text to somebody.",
        parameters={"name": "string", "text": "string"},
        asked=("Send a message to {name}: {text}", "Tell {name}: {text}", "Write to {name}: {text}"),
        values=message,
        result=done,
        told="The message to {name} is sent.",
        weight=2,
    ),
    Tool(
        name="search",
        description="Searches the web.",
        parameters={"query": "string"},
        asked=("Search for {query}", "Search the web for {query}", "Look for {query}", "Find pages about {query}"),
        values=query,
        result=lambda rng: {"pages": rng.randint(2, 99)},
        told="I found {pages} pages about {query}.",
    ),
    Tool(
        name="convert",
        description="Converts money.",
        parameters={"amount": "integer", "from": "string", "to": "string"},
        asked=(
            "Convert {amount} {from} to {to}.",
            "How much is {amount} {from} in {to}?",
            "What are {amount} {from} in {to}?",
            "Change {amount} {from} to {to}.",
        ),
        values=money,
        result=lambda rng: {"result": rng.randint(2, 999)},
        told="{amount} {from} are {result} {to}.",
    ),
    Tool(
        name="translate",
        description="Translates a text.",
        parameters={"text": "string", "language": "string"},
        asked=(
            'Translate "{text}" to {language}.',
            'What is "{text}" in {language}?',
            'How do you say "{text}" in {language}?',
            'Say "{text}" in {language}.',
        ),
        values=translation,
        result=lambda rng: {"result": f"{invented_name(rng)} {invented_name(rng).lower()}"},
        told="In {language} it is: {result}",
    ),
    Tool(
        name="turn_on_light",
        description="Turns on the light in a room.",
        parameters={"room": "string"},
        asked=(
            "Turn on the light in the {room}.",
            "Light in the {room}, please.",
            "It is dark in the {room}.",
            "Switch on the light in the {room}.",
        ),
        values=room,
        result=done,
        told="The light in the {room} is on.",
    ),
)
