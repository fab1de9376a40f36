"""Games of TextWorld: `python coin_games.py FOLDER COUNT FIRST_SEED` writes them, where they are not there."""

import sys
from pathlib import Path

import textworld
from textworld.challenges import CHALLENGES

__all__ = ["main"]


def main() -> None:
    """Two rooms, and a coin in the second."""
    folder, count, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    _, make, _ = CHALLENGES["tw-coin_collector"]
    for seed in range(first, first + count):
        options = textworld.GameOptions()
        options.seeds, options.path = seed, str(folder / f"{seed}.z8")
        if not Path(options.path).exists():
            textworld.generator.compile_game(make({"level": 2}, options), options)


if __name__ == "__main__":
    main()
