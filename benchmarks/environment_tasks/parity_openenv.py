"""Even or odd, as a class of OpenEnv."""

import random

from openenv.core.env_server import Action, Environment, Observation, State

__all__ = ["Parity"]

ORDER = random.Random(0).sample(range(1000), 1000)


class Word(Action):
    """The answer."""

    text: str


class Number(Observation):
    """The question."""

    text: str = ""


class Parity(Environment):
    """A number below 1000 by seed; 200 are held out, for seeds from 1,000,000,000."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        """Ask."""
        seed = seed or 0
        self.number = ORDER[800 + seed % 200 if seed >= 10**9 else seed % 800]
        return Number(text=f"{self.number:03}")

    def step(self, action: Word, timeout_s=None, **kwargs):
        """1 if the answer is right."""
        right = action.text.strip() == ("even" if self.number % 2 == 0 else "odd")
        return Number(done=True, reward=float(right))

    @property
    def state(self):
        """Nothing."""
        return State()
