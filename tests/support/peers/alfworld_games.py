"""Makes games of ALFWorld with its package alone: rooms of our own in its PDDL domain, with its goals, grammar and experts.

The games that people train on are made of ALFRED's scenes, which `alfworld-download` gets from the network. These have the same
domain and the same kinds of task, and small rooms. Runs where the package is installed.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACES = {
    "Fridge": "openable", "Microwave": "openable", "SinkBasin": "", "CounterTop": "", "Cabinet": "openable", "Desk": "",
}  # fmt: skip
"""The types of the room's receptacles, and whether they are opened."""
TASKS: dict[str, tuple[str, str, str]] = {
    "pick_and_place_simple": ("Apple", "CounterTop", ""),
    "look_at_obj_in_light": ("Book", "", "DeskLamp"),
    "pick_clean_then_place_in_recep": ("Mug", "Cabinet", ""),
    "pick_heat_then_place_in_recep": ("Potato", "CounterTop", ""),
    "pick_cool_then_place_in_recep": ("Apple", "Microwave", ""),
    "pick_two_obj_and_place": ("Mug", "Desk", ""),
}
"""For each kind of task its object, the receptacle where it belongs, and what is switched on."""
THINGS = {"Apple": 2, "Potato": 1, "Mug": 2, "Book": 1, "DeskLamp": 1}


@dataclass(frozen=True, slots=True)
class Room:
    """A game."""

    task: str
    """Its kind, one of `TASKS`."""
    target: str
    """The type of its object."""
    place: str
    """The type of the receptacle where it belongs."""
    toggle: str
    """The type of what is switched on."""
    places: Mapping[str, str]
    """As `PLACES`."""
    things: Sequence[tuple[str, int]]
    """Each thing's type, and the number of its receptacle among the places."""


def make_games(folder: Path, tasks: Sequence[str] = tuple(TASKS), *, seed: int = 0) -> list[Path]:
    """Write a game for each task in the layout of ALFWorld's data. Returns the files."""
    return [write_game(folder, room(task, seed + number), seed + number) for number, task in enumerate(tasks)]


def room(task: str, seed: int) -> Room:
    """A room for a kind of task: where things are depends on the seed."""
    target, place, toggle = TASKS[task]
    kinds = [kind for kind, count in THINGS.items() for _ in range(count)]
    things = list[tuple[str, int]]()
    for number, kind in enumerate(kinds):
        at = len(PLACES) - 1 if kind == "DeskLamp" else (seed + number) % (len(PLACES) - 1)
        if kind == target and list(PLACES)[at] == place:
            at = (at + 1) % (len(PLACES) - 1)
        things.append((kind, at))
    return Room(task, target, place, toggle, PLACES, things)


def write_game(folder: Path, room: Room, seed: int) -> Path:
    """Write a game in the layout of ALFWorld's data. Returns its file."""
    from alfworld.agents.utils.misc import add_task_to_grammar  # pyright: ignore[reportMissingImports]
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH  # pyright: ignore[reportMissingImports]

    parameters = {
        "object_target": room.target,
        "parent_target": room.place,
        "toggle_target": room.toggle,
        "mrecep_target": "",
        "object_sliced": False,
    }
    trajectory = {"task_type": room.task, "pddl_params": parameters}
    data: dict[str, Any] = {
        "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
        "grammar": add_task_to_grammar(Path(ALFRED_TWL2_PATH).read_text(), trajectory),
        "pddl_problem": problem(room),
        "solvable": True,
    }
    name = f"{room.task}-{room.target}-None-{room.place or room.toggle}-{seed}"
    file = folder / name / "trial_T1" / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(data), encoding="utf-8")
    (file.parent / "traj_data.json").write_text(json.dumps(trajectory), encoding="utf-8")
    return file


def problem(room: Room) -> str:
    """The PDDL problem of a game."""
    from alfworld.gen.goal_library import gdict  # pyright: ignore[reportMissingImports]

    goal = (
        gdict[room.task]["pddl"]
        .format(obj=room.target, recep=room.place, toggle=room.toggle, mrecep="")
        .replace("#", "-")
        .rstrip()
        .removesuffix(")")
    )
    places = [f"{kind}_bar_1" for kind in room.places]
    kinds = dict.fromkeys(kind for kind, _ in room.things)
    lines = [f"(receptacleType {one} {one.partition('_')[0]}Type)" for one in places]
    lines += [f"(receptacleAtLocation {one} loc_{number})" for number, one in enumerate(places)]
    lines += [f"(openable {one})" for one in places if room.places[one.partition("_")[0]]]
    lines += [f"(canContain {place}Type {kind}Type)" for place in room.places for kind in kinds]
    things = list[str]()
    for kind, at in room.things:
        thing = f"{kind}_bar_{sum(one.startswith(f'{kind}_') for one in things)}"
        things.append(thing)
        lines += [
            f"(objectType {thing} {kind}Type)",
            f"(inReceptacle {thing} {places[at]})",
            f"(objectAtLocation {thing} loc_{at})",
        ]
        lines += (
            [f"(toggleable {thing})"]
            if kind == "DeskLamp"
            else [f"({able} {thing})" for able in ("pickupable", "cleanable", "heatable", "coolable")]
        )
    types = [f"{kind}Type - rtype" for kind in room.places]
    types += [f"{kind}Type - otype" for kind in (*kinds, "Knife", "ButterKnife")]
    objects = [
        "agent1 - agent",
        *types,
        *(f"{one} - receptacle" for one in places),
        *(f"{one} - object" for one in things),
    ]
    objects += [f"loc_{number} - location" for number in range(len(places) + 1)]
    begin = f"(atLocation agent1 loc_{len(places)})"
    return (
        "(define (problem made_here)\n(:domain alfred)\n(:objects\n"
        + "\n".join(objects)
        + ")\n(:init\n"
        + "\n".join([begin, *lines, "(= (total-cost) 0)"])
        + f")\n{goal}\n)"
    )


def plan(file: Path) -> list[str]:
    """The commands that win a game, from the planner of the package."""
    import textworld  # pyright: ignore[reportMissingImports]
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos  # pyright: ignore[reportMissingImports]

    infos = textworld.EnvInfos(policy_commands=True)
    with contextlib.redirect_stdout(io.StringIO()):
        game = textworld.start(str(file), request_infos=infos, wrappers=[AlfredDemangler(), AlfredInfos])
        state = game.reset()
        commands = list(state["policy_commands"])
    game.close()
    return commands
