"""Needles: invented facts about people, drawn from a seed, and the six ways to plant and to ask for them."""

import random
from collections.abc import Callable
from dataclasses import dataclass


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = listed(
    "Abena Bjarne Calista Dmitri Eluned Farouk Giulia Henrik Ioana Jomo Katya Leandro Mireille Nikhil Oriana Pavel "
    "Quentin Rosalind Soren Tamsin Ulrich Valeria Wendell Ximena Yusuf Zelda Anneke Basil Carmela Desmond Esperanza "
    "Fergus Greta Horatio Imogen Jasper Kerstin Lubomir Marguerite Nestor Ottilie Percival Ramona Sigrid Thaddeus"
)
WORDS = listed(
    "walnut lantern copper violin harbor saddle pepper anchor meadow ribbon thunder candle falcon marble orchard "
    "velvet pickle compass cactus feather hammer igloo jacket kettle lemon mirror needle oyster parrot quilt rocket "
    "spider tunnel umbrella valley whistle zebra button cherry dragon engine fossil garlic helmet island jungle ladder"
)
PLACES = listed(
    "Lisbon Nairobi Helsinki Quito Manila Tbilisi Havana Krakow Dakar Sapporo Valencia Auckland Bogota Cairo Dublin "
    "Edinburgh Florence Geneva Hanoi Istanbul Jakarta Kyoto Lima Marseille Naples Oslo Prague Riga Seville Tallinn "
    "Utrecht Vienna Warsaw Zagreb Athens Bergen Cordoba Denver Tunis Montreal"
)


@dataclass(frozen=True)
class Fact:
    """That ``name``'s something is ``value``."""

    subject: str
    name: str
    value: str

    @property
    def opening(self) -> str:
        """The statement up to its value."""
        return f"The {self.subject} of {self.name} is"

    @property
    def statement(self) -> str:
        return f"{self.opening} {self.value}."

    @property
    def question(self) -> str:
        return f"What is the {self.subject} of {self.name}?"


VALUES: dict[str, Callable[[random.Random], str]] = {
    "secret word": lambda draw: draw.choice(WORDS),
    "home town": lambda draw: draw.choice(PLACES),
    "locker code": lambda draw: str(draw.randrange(10000, 100000)),
}


@dataclass(frozen=True)
class Needles:
    """Facts to plant, each with its depth in the haystack (0 first, 1 last), and those of them that are asked for."""

    planted: tuple[tuple[float, Fact], ...]
    asked: tuple[Fact, ...]

    @property
    def request(self) -> str:
        if len(self.asked) == 1:
            return self.asked[0].question
        return "\n".join(f"{number}. {fact.question}" for number, fact in enumerate(self.asked, 1))

    @property
    def answer(self) -> list[tuple[str, str]]:
        """The right answer in pieces: what leads to a value, and the value."""
        if len(self.asked) == 1:
            return [(self.asked[0].opening, self.asked[0].value)]
        ends = ["", *[".\n"] * (len(self.asked) - 1)]  # what stands after the value before
        return [
            (f"{end}{number}. {fact.opening}", fact.value)
            for number, (end, fact) in enumerate(zip(ends, self.asked, strict=True), 1)
        ]


def draw_needles(task: str, depth: float, seed: str) -> Needles:
    """The needles of ``task`` (a key of ``TASKS``) around ``depth``, the same for the same seed."""
    return TASKS[task](depth, random.Random(f"{task} {seed}"))


def draw_facts(draw: random.Random, count: int, subjects: list[str] | None = None) -> list[Fact]:
    """Facts about different people with different values, of one subject that is drawn, or of ``subjects`` in turn."""
    names = draw.sample(NAMES, count)
    subjects = subjects or [draw.choice(list(VALUES))]
    facts: list[Fact] = []
    while len(facts) < count:
        subject = subjects[len(facts) % len(subjects)]
        value = VALUES[subject](draw)
        if value not in [fact.value for fact in facts]:
            facts.append(Fact(subject, names[len(facts)], value))
    return facts


def clamped(*depths: float) -> list[float]:
    return [min(1.0, max(0.0, depth)) for depth in depths]


def single(depth: float, draw: random.Random) -> Needles:
    """One fact."""
    [fact] = draw_facts(draw, 1)
    return Needles(((depth, fact),), (fact,))


def distractor(depth: float, draw: random.Random) -> Needles:
    """One fact, and after it the same of two other people."""
    facts = draw_facts(draw, 3)
    return Needles(tuple(zip(clamped(depth, depth + 0.1, depth + 0.2), facts, strict=True)), (facts[0],))


def multi(depth: float, draw: random.Random) -> Needles:
    """Three facts of different kinds far apart, of which one is asked for."""
    facts = draw_facts(draw, 3, draw.sample(list(VALUES), 3))
    return Needles(tuple(zip(spread(depth), facts, strict=True)), (facts[0],))


def multikey(depth: float, draw: random.Random) -> Needles:
    """Three facts of one kind close together, all asked for."""
    facts = draw_facts(draw, 3)
    return Needles(tuple(zip(clamped(depth - 0.05, depth, depth + 0.05), facts, strict=True)), tuple(facts))


def multivalue(depth: float, draw: random.Random) -> Needles:
    """Three facts about one person far apart, all asked for."""
    name = draw.choice(NAMES)
    facts = [Fact(subject, name, value(draw)) for subject, value in VALUES.items()]
    return Needles(tuple(zip(spread(depth), facts, strict=True)), tuple(facts))


def multiquery(depth: float, draw: random.Random) -> Needles:
    """Three facts of different kinds about different people, all asked for."""
    facts = draw_facts(draw, 3, draw.sample(list(VALUES), 3))
    return Needles(tuple(zip(clamped(depth - 0.3, depth, depth + 0.3), facts, strict=True)), tuple(facts))


def spread(depth: float) -> list[float]:
    """Three depths a third of the haystack apart, the first one given."""
    return [depth, (depth + 1 / 3) % 1, (depth + 2 / 3) % 1]


TASKS: dict[str, Callable[[float, random.Random], Needles]] = {
    "single": single,
    "distractor": distractor,
    "multi": multi,
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
}
