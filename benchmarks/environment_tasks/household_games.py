"""Games of ALFWorld: `python household_games.py FOLDER COUNT FIRST_SEED` writes them, where they are not there.

A room has the same two places, and one thing that must be put from one of them to the other. The things of seeds below 1000 are
others than those of the seeds from 1000.
"""

import importlib.util
import sys
from pathlib import Path

__all__ = ["main"]

PEER = Path(__file__).resolve().parents[2] / "tests" / "support" / "peers" / "alfworld_games.py"
PLACES = ("Desk", "Shelf")
THINGS = (("Apple", "Book"), ("Mug", "Plate"))
HELD_OUT = 1000
"""The first seed of held-out rooms, which have the last things."""


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
        things = THINGS[seed >= HELD_OUT]
        thing, (at, to) = things[seed // 2 % len(things)], PLACES[:: 1 if seed % 2 else -1]
        room = games.Room("pick_and_place_simple", thing, to, "", {at: "", to: ""}, [(thing, 0)])
        if not list(folder.glob(f"*-{seed}")):
            games.write_game(folder, room, seed)


if __name__ == "__main__":
    main()
