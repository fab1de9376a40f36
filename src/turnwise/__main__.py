"""`python -m turnwise` is the command `turnwise`."""

import sys

from turnwise.cli import program

if __name__ == "__main__":
    sys.exit(program())
