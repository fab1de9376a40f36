"""Makes games of ALFWorld with its package alone: rooms of our own in its PDDL domain, with its goals, grammar and experts.

The games that people train on are made of ALFRED's scenes, which `alfworld-download` gets from the network. These have the same
domain and the same kinds of task, and small rooms. Runs where the package is installed.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
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


def make_games(folder: Path, tasks: Sequence[str] = tuple(TASKS), *, seed: int = 0) -> list[Path]:
    """Write a game for each task in the layout of ALFWorld's data, with the plan of its planner. Returns the files."""
    from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH  # pyright: ignore[reportMissingImports]

    domain, grammar = Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()
    return [_game(folder, task, seed + number, domain, grammar) for number, task in enumerate(tasks)]


def _game(folder: Path, task: str, seed: int, domain: str, grammar: str) -> Path:
    from alfworld.agents.utils.misc import add_task_to_grammar  # pyright: ignore[reportMissingImports]

    target, place, toggle = TASKS[task]
    parameters = {
        "object_target": target,
        "parent_target": place,
        "toggle_target": toggle,
        "mrecep_target": "",
        "object_sliced": False,
    }
    trajectory = {"task_type": task, "pddl_params": parameters}
    data: dict[str, Any] = {
        "pddl_domain": domain, "grammar": add_task_to_grammar(grammar, trajectory), "pddl_problem": problem(task, seed),
        "solvable": True,
    }  # fmt: skip
    file = folder / f"{task}-{target}-None-{place or toggle}-{seed}" / "trial_T1" / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(data), encoding="utf-8")
    (file.parent / "traj_data.json").write_text(json.dumps(trajectory), encoding="utf-8")
    return file


def problem(task: str, seed: int) -> str:
    """The PDDL problem of a task: where things are depends on the seed."""
    from alfworld.gen.goal_library import gdict  # pyright: ignore[reportMissingImports]

    target, place, toggle = TASKS[task]
    goal = (
        gdict[task]["pddl"]
        .format(obj=target, recep=place, toggle=toggle, mrecep="")
        .replace("#", "-")
        .rstrip()
        .removesuffix(")")
    )
    places = [f"{kind}_bar_1" for kind in PLACES]
    things = [f"{kind}_bar_{number}" for kind, count in THINGS.items() for number in range(count)]
    lines = [f"(receptacleType {one} {one.partition('_')[0]}Type)" for one in places]
    lines += [f"(receptacleAtLocation {one} loc_{number})" for number, one in enumerate(places)]
    lines += [f"(openable {one})" for one in places if PLACES[one.partition("_")[0]]]
    lines += [f"(canContain {kind}Type {thing}Type)" for kind in PLACES for thing in THINGS]
    for number, thing in enumerate(things):
        kind = thing.partition("_")[0]
        at = len(places) - 1 if kind == "DeskLamp" else (seed + number) % (len(places) - 1)
        if kind == target and places[at].startswith(place or "-"):
            at = (at + 1) % (len(places) - 1)
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
    types = [f"{kind}Type - rtype" for kind in PLACES] + [
        f"{kind}Type - otype" for kind in (*THINGS, "Knife", "ButterKnife")
    ]
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
