"""Games of ALFWorld: `python household_games.py FOLDER COUNT FIRST_SEED` writes them, where they are not there.

A room has three places, and one thing that must be put from one of them to another.
"""

import importlib.util
import random
import sys
from pathlib import Path

__all__ = ["main"]

PEER = Path(__file__).resolve().parents[2] / "tests" / "support" / "peers" / "alfworld_games.py"
PLACES = ("CounterTop", "Desk", "Shelf", "Bed", "Dresser")
THINGS = ("Apple", "Mug", "Book", "Potato")


def main() -> None:
    """Write the games."""
    folder, count, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    found = importlib.util.spec_from_file_location("alfworld_games", PEER)
    assert found is not None
    assert found.loader is not None
    games = importlib.util.module_from_spec(found)
    sys.modules["alfworld_games"] = games
    found.loader.exec_module(games)
    for seed in range(first, first + count):
        draws = random.Random(seed)
        places = draws.sample(PLACES, 3)
        at, to = draws.sample(range(3), 2)
        thing = draws.choice(THINGS)
        room = games.Room("pick_and_place_simple", thing, places[to], "", dict.fromkeys(places, ""), [(thing, at)])
        if not list(folder.glob(f"*-{seed}")):
            games.write_game(folder, room, seed)


if __name__ == "__main__":
    main()
