"""The largest digit of a number, as a class of OpenEnv."""

import random

from openenv.core.env_server import Action, Environment, Observation, State

__all__ = ["Digits"]

ORDER = random.Random(0).sample(range(1000), 1000)


class Digit(Action):
    """The answer."""

    text: str


class Number(Observation):
    """The question."""

    text: str = ""


class Digits(Environment):
    """A number below 1000 by seed; 200 are held out, for seeds from 1,000,000,000."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        """Ask."""
        seed = seed or 0
        self.number = ORDER[800 + seed % 200 if seed >= 10**9 else seed % 800]
        return Number(text=f"{self.number:03}")

    def step(self, action: Digit, timeout_s=None, **kwargs):
        """1 if the answer is right."""
        right = action.text.strip() == max(f"{self.number:03}")
        return Number(done=True, reward=float(right))

    @property
    def state(self):
        """Nothing."""
        return State()
