"""Rooms of ALFWorld's task `pick_and_place_simple`, and what the game says in them: `room(triple, seed)`, `played(room, draws)`.

A room has three places and two things, one of which must be put from its place to another. This thing and the two places are a
triple. Triples that are held out are not trained on, but their things and places are, in other triples. Imports only the standard
library, because the Python with ALFWorld's package writes the games.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HELD_OUT", "TRIPLES", "TURNS", "Game", "Room", "played", "random_conversation", "random_room", "room"]

PLACES = ("Bed", "CoffeeTable", "CounterTop", "Desk", "DiningTable", "Shelf", "SideTable", "Sofa")
THINGS = ("Apple", "Book", "Bowl", "Candle", "Cup", "Egg", "Fork", "Mug", "Pen", "Plate", "Spoon", "Vase")
TRIPLES = [(thing, at, to) for thing in THINGS for at in PLACES for to in PLACES if at != to]
random.Random(0).shuffle(TRIPLES)
HELD_OUT = 120
"""The first triples of 672 are held out; all others are to train on."""
TURNS = 7
"""Of a game. The expert wins with four or five."""
EXPERT = 0.6
"""The share of commands that are an expert's in conversations of the start model."""


@dataclass(frozen=True, slots=True)
class Room:
    """A game: names as in `PLACES` and `THINGS`."""

    places: tuple[str, ...]
    target: str
    goal: str
    at: dict[str, str]
    """The place of each thing."""


def room(triple: tuple[str, str, str], seed: int) -> Room:
    """A room for a triple, with another place and another thing that depend on the seed."""
    draws = random.Random(seed)
    target, at, goal = triple
    places = sorted([at, goal, draws.choice([place for place in PLACES if place not in (at, goal)])])
    other = draws.choice([thing for thing in THINGS if thing != target])
    return Room(tuple(places), target, goal, {target: at, other: draws.choice(places)})


class Game:
    """A room that is played. Names are in lower case, as the game writes them."""

    def __init__(self, room: Room) -> None:
        self.places = [place.lower() for place in room.places]
        self.target, self.goal = room.target.lower(), room.goal.lower()
        self.at = {thing.lower(): place.lower() for thing, place in room.at.items()}
        self.here, self.held = "", ""
        self.seen = set[str]()

    def chores(self) -> list[str]:
        """The commands that go, take or move."""
        moves = [f"go to {place} 1" for place in self.places if place != self.here]
        if self.held:
            return [*moves, *([f"move {self.held} 1 to {self.here} 1"] if self.here else [])]
        return [*moves, *(f"take {thing} 1 from {self.here} 1" for thing in self._things())]

    def listed(self) -> list[str]:
        """All commands."""
        examined = [f"examine {one} 1" for one in (self.here, self.held) if one]
        return sorted([*self.chores(), *examined, "help", "inventory", "look"])

    def expert(self, draws: random.Random) -> str:
        """A command of a shortest way to the goal, without knowing what lies in places that were not seen."""
        if self.held == self.target:
            return f"move {self.held} 1 to {self.here} 1" if self.here == self.goal else f"go to {self.goal} 1"
        if self.held:
            return f"move {self.held} 1 to {self.here} 1"
        if self.at[self.target] == self.here:
            return f"take {self.target} 1 from {self.here} 1"
        known = [self.at[self.target]] if self.at[self.target] in self.seen else []
        others = [place for place in self.places if place not in self.seen and place != self.goal]
        return f"go to {draws.choice(known or others or [place for place in self.places if place != self.here])} 1"

    def step(self, command: str) -> str:
        """What the game says."""
        match command.split():
            case ["go", _, place, _]:
                self.here = place
                self.seen.add(place)
                return f"You arrive at {place} 1. On the {place} 1, you see {_listed(self._things())}."
            case ["take", thing, *_]:
                self.held, self.at[thing] = thing, ""
                return f"You pick up the {thing} 1 from the {self.here} 1."
            case ["move", thing, *_]:
                self.held, self.at[thing] = "", self.here
                return f"You move the {thing} 1 to the {self.here} 1."
            case _:
                raise ValueError(command)

    def _things(self) -> list[str]:
        return sorted(thing for thing, place in self.at.items() if place == self.here)


def played(room: Room, draws: random.Random) -> list[tuple[str, str]]:
    """A conversation: the messages of the game, each with a command of the expert or a random chore, until the task is done or
    `TURNS` are over."""
    game, words = Game(room), draws.choice([("a", "in"), ("some", "on")])
    shown = (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        f"{_listed(game.places)}.\n\nYour task is to: put {words[0]} {game.target} {words[1]} {game.goal}."
    )
    turns = list[tuple[str, str]]()
    for _ in range(TURNS):
        text = f"{shown}\n\nCommands: {', '.join(game.listed())}"
        command = game.expert(draws) if draws.random() < EXPERT else draws.choice(game.chores())
        turns.append((text, command))
        shown = game.step(command)
        if game.at[game.target] == game.goal:
            break
    return turns


def random_room(draws: random.Random) -> Room:
    """A room for a triple that is not held out."""
    return room(draws.choice(TRIPLES[HELD_OUT:]), draws.randrange(10**6))


def random_conversation(draws: random.Random) -> list[tuple[str, str]]:
    """A conversation of the start model."""
    return played(random_room(draws), draws)


def _listed(names: Sequence[str]) -> str:
    """Names as the game lists them: `a desk 1, and a shelf 1`."""
    shown = [f"a {name} 1" for name in names]
    return f"{', '.join(shown[:-1])}, and {shown[-1]}" if len(shown) > 1 else shown[0] if shown else "nothing"
