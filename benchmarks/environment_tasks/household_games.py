"""Games of ALFWorld: `python household_games.py FOLDER COUNT FIRST` writes them, where they are not there.

One for each of COUNT triples of `learning_tasks.household` from the place FIRST.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[2]


def loaded(name: str, folder: str) -> ModuleType:
    """A module of a file. Packages of its folder need what this Python does not have."""
    found = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def main() -> None:
    """Write the games."""
    folder, count, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    games = loaded("alfworld_games", "tests/support/peers")
    household = loaded("household", "benchmarks/learning_tasks")
    for seed in range(first, first + count):
        drawn = household.room(household.TRIPLES[seed], seed)
        things = [(thing, drawn.places.index(place)) for thing, place in drawn.at.items()]
        game = games.Room(
            "pick_and_place_simple", drawn.target, drawn.goal, "", dict.fromkeys(drawn.places, ""), things
        )
        if not list(folder.glob(f"*-{seed}")):
            games.write_game(folder, game, seed)


if __name__ == "__main__":
    main()
