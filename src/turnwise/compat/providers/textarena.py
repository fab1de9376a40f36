"""`environment: textarena:TicTacToe-v0`: a game of TextArena, against itself or against opponents.

A row is a number in the column `seed`. The wrappers of the registered name stay: what the model receives is what they show, and
what it writes goes through them; illegal moves are answered as the game does it. A wrapper that repeats the whole game in each
observation is shown without the part that the conversation has already.

The games draw from Python's and numpy's global random generators. Each conversation has states of its own, which are set while
one of its calls runs, one call after the other: games do not influence each other, and depend on the seed only."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from turnwise.compat.object_factory import number, opened, plain, referred
from turnwise.compat.providers.provider import About, LibraryEnvironments, refuse_unknown_name
from turnwise.data.rows import ProvidedRows, seed_rows
from turnwise.environments.environment import Environment, EpisodeAgent, current_episode
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.services.chat import ChatModel, ask_chat_model, given_chat_model
from turnwise.types import Message, Opening, Reply, Row, Turn
from turnwise.user_code.threads import ThreadedObject, run_in_thread

_MOST_PLAYERS = 6
_MOST_MOVES = 200
"""Moves of opponents in a row."""
_WAIT = 60.0  # seconds for the calls of other games
_PLAYER = "You play a game. Read its rules, and answer with your next move in the form that they ask for."
_TOLD = "GAME_ADMIN"
"""The library's kind of messages about moves that are not allowed, and about the end of a game."""
_MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
_OPPONENT_KEYS = ("policy", "endpoint", "chat_model", "system_prompt")

Opponent = Callable[[str, random.Random], Any]
"""The move after an observation; may be async."""


class TextArena(LibraryEnvironments):
    """Makes the games of a registered name (an EnvironmentSource with rows).

    Args:
        name: A registered name, such as `TicTacToe-v0` or `Mastermind-v0-train`.
        arguments: Keyword arguments with which the game is created.
        players: The number of players. Null: the smallest number that the game accepts.
        seat: The number of the player that the model is, from 0; `alternate` takes the seats in turn, by the seed of the row.
        opponent: Who the other players are. `random`: one of the moves in brackets that the last observation shows, drawn by the
            seed. A reference `file.py:move` to a function from an observation to a move. `self`: the model, in conversations of
            its own. A mapping with `policy`: a policy of the recipe; with `endpoint` (a model on a server) or `chat_model`, and
            optionally `system_prompt`: another model.
        reward_scale: The factor of the game's rewards.

    Raises ConfigError.
    """

    writes_prompt = True
    preview: ClassVar[Mapping[str, Any]] = {"opponent": "random"}

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        players: int | None = None,
        seat: int | Literal["alternate"] = "alternate",
        opponent: str | Callable[..., Any] | Mapping[str, Any] | None = None,
        reward_scale: float = 1.0,
    ) -> None:
        refuse_unknown_name(name, self.names(), provider="textarena")
        self.name = name
        self._arguments = dict(arguments or {})
        self.players = self._count_players(players)
        if seat != "alternate" and (isinstance(seat, bool) or seat not in range(self.players)):
            raise ConfigError(
                f"environment.arguments.seat is {seat!r}; with {self.players} player{'s' * (self.players > 1)} it must be "
                f"{'0' if self.players == 1 else f'0 to {self.players - 1}, or alternate'}"
            )
        if self.players > 1 and opponent is None:
            raise ConfigError(
                f"textarena:{name} is a game of {self.players} players, and the model is one of them: set "
                f"environment.arguments.opponent to self, to random, to a function, or to another model"
            )
        if self.players == 1 and opponent is not None:
            raise ConfigError(
                f"environment.arguments.opponent has no effect: textarena:{name} has one player; remove it"
            )
        self._seat: int | Literal["alternate"] = seat
        self.opponent = None if opponent is None else _opponent(opponent)
        self.reward_scale = reward_scale

    @classmethod
    def names(cls) -> Sequence[str]:
        """The registered names."""
        return list(_registration().ENV_REGISTRY)

    def about(self) -> About:
        """What the game brings."""
        return About(rows="endless, by seed", players=str(self.players))

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """Rows of seeds."""
        return seed_rows(count, held_out=held_out)

    def seat(self, seed: int) -> int:
        """The player that the model is."""
        return seed % self.players if self._seat == "alternate" else self._seat

    def make_game(self) -> Any:
        """A new game."""
        return _registration().make(self.name, **self._arguments)

    def _count_players(self, given: int | None) -> int:
        """The number of players. Raises ConfigError with the game's own message if no game can begin."""
        problem = ""
        try:
            with boundary("environment"), _OwnRandom(0).active():
                game = self.make_game()
        except Failed as failed:
            raise ConfigError(
                f"environment: textarena:{self.name} cannot be created: {failed.failure.message}{_data_hint(failed)}"
            ) from None
        for players in [given] if given is not None else range(1, _MOST_PLAYERS + 1):
            try:
                with boundary("environment"), _OwnRandom(0).active():
                    game.reset(num_players=players, seed=0)
                return players
            except Failed as failed:
                problem = failed.failure.message
        wanted = "1 to 6" if given is None else str(given)
        raise ConfigError(f"environment: textarena:{self.name} does not begin with {wanted} players: {problem}")

    def __call__(self) -> Environment:
        return _TextGame(self)


def _registration() -> Any:
    """The library's register of games; the library need not be installed where types are checked."""
    importlib.import_module("textarena")  # fills it
    return importlib.import_module("textarena.envs.registration")


class _TextGame:
    """One conversation: one game."""

    def __init__(self, source: TextArena) -> None:
        self._source = source
        self._foreign = ThreadedObject(self._make_game, None, name=f"textarena:{source.name}")
        self._view = _View()
        self._agents: dict[int, _AgentPlayer] = {}
        """The players that are agents of the episode."""
        self._told: dict[int, int] = {}
        """How many messages of the game each player has got."""
        self._unfinished = ""
        """Why the game cannot go on, though it has not ended."""

    async def begin(self, row: Row) -> Opening:
        seed = row["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"row {row.id!r} has seed={seed!r:.80}; it must be an integer of at least 0")
        self._row = row
        self._random = _OwnRandom(seed)
        self._game = await self._foreign.make()
        await self._ask(partial(self._game.reset, num_players=self._source.players, seed=seed % (1 << 32)))
        done, seen, _ = await self._opponents_move()
        if not done:
            return Opening(messages=opened(row.messages, self._view.new(seen)))
        if not isinstance(self._source.opponent, _OfEpisode):
            raise ValueError(
                f"textarena:{self._source.name} ended before the first move of player {self._seat}: another player, who moves "
                f"first, has ended it (set environment.arguments.seat to 0, or another environment.arguments.opponent)"
            )
        if not self._unfinished:
            await self._result()  # the rewards of the agents
        why = self._unfinished or "another player has ended the game"
        return Opening(messages=opened(row.messages, f"[{why}]"), done=True)

    @property
    def _seat(self) -> int:
        """The player that the model is."""
        return self._source.seat(self._row["seed"])

    async def step(self, turn: Turn) -> Reply:
        move = str(turn.message.get("content") or "").strip()
        done, info = await self._move(move)
        seen = _Seen("")
        if not done:
            done, seen, more = await self._opponents_move()
            info |= more
        if self._unfinished:
            return Reply(done=True, info={**info, "unfinished": self._unfinished})
        if done:
            rewards, game_info = await self._result()
            return Reply(reward=rewards, done=True, info={**info, **game_info})
        return Reply(messages=[{"role": "user", "content": self._view.new(seen, move)}], info=info)

    async def close(self) -> None:
        for player in self._agents.values():
            await player.agent.close()
        await self._foreign.close()
        if self._foreign.busy:
            self._random.leave()

    async def _move(self, move: str) -> tuple[bool, dict[str, Any]]:
        """Make a move of the present player. Whether the game is over, and what it says of the move."""
        answered = await self._ask(partial(self._game.step, action=move))
        if not isinstance(answered, tuple) or len(answered) != 2 or not isinstance(answered[0], bool | np.bool_):
            raise TypeError(f"textarena:{self._source.name}.step returned {answered!r:.200}; it must be (done, info)")
        info = answered[1]
        return bool(answered[0]), plain(info) if isinstance(info, Mapping) else {}

    async def _opponents_move(self) -> tuple[bool, _Seen, dict[str, Any]]:
        """Let the opponents move until it is the model's turn. Whether the game is over or cannot go on, and the observation."""
        info: dict[str, Any] = {}
        for _ in range(_MOST_MOVES):
            answered = await self._ask(self._game.get_observation)
            if not isinstance(answered, tuple) or len(answered) != 2:
                raise TypeError(
                    f"textarena:{self._source.name}.get_observation returned {answered!r:.200}; it must be (player, text)"
                )
            player, observation = answered
            if not isinstance(observation, str):  # a name without wrappers: messages (sender, text, kind)
                observation = "\n".join(str(message[1]) for message in observation)
            seen = _Seen(observation, await self._ask(partial(self._hidden, player, observation)))
            if player == self._seat:
                return False, seen, info
            assert self._source.opponent is not None
            if isinstance(self._source.opponent, _OfEpisode):
                move = await self._agents_move(player, self._source.opponent.policy, seen)
                if self._unfinished:
                    return True, _Seen(""), info
            else:
                move = await self._opponent(self._source.opponent, observation)
            done, _ = await self._move(move)
            info = {"opponent": move}
            if done:
                return True, _Seen(""), info
        raise ValueError(f"textarena:{self._source.name}: it was not the model's turn in {_MOST_MOVES} moves")

    async def _opponent(self, opponent: Opponent, observation: str) -> str:
        name = f"the opponent in textarena:{self._source.name}"
        move = await run_in_thread(
            partial(opponent, observation, self._random.of_opponent), name=name, kind="environment"
        )
        if inspect.isawaitable(move):
            move = await move
        if not isinstance(move, str):
            raise TypeError(f"{name} made the move {move!r:.80}; it must be a text")
        return move

    async def _agents_move(self, player: int, policy: str | None, seen: _Seen) -> str:
        """The move of an agent of the episode; nothing if a limit has ended its conversation."""
        if player not in self._agents:
            messages = opened(self._row.messages, (view := _View()).new(seen))
            opponent = current_episode().agent(f"player_{player}", messages=messages, policy=policy)
            self._agents[player] = _AgentPlayer(opponent, view)
            new: str | Sequence[Message] = ()
        else:
            new = self._agents[player].view.new(seen, self._agents[player].move)
        one = self._agents[player]
        try:
            turn = await one.agent.turn(new)
            ended = turn.finish_reason == "length"
        except Failed:
            ended = one.agent.trajectory.stop is not None and one.agent.trajectory.error is None
            if not ended:
                raise
            turn = one.agent.trajectory.turns[-1]
        if ended:
            self._unfinished = f"a limit ended the conversation of player {player}"
            return ""
        one.move = str(turn.message.get("content") or "").strip()
        return one.move

    async def _result(self) -> tuple[float, dict[str, Any]]:
        """The model's reward, and what the game says of its player."""
        answered = await self._ask(self._game.close)
        if not isinstance(answered, tuple) or len(answered) != 2 or not isinstance(answered[0], Mapping):
            raise TypeError(
                f"textarena:{self._source.name} ended with {answered!r:.200}; it must be (rewards by player, infos by player)"
            )
        rewards, infos = answered
        reward, *others = [
            number(rewards.get(player), f"textarena:{self._source.name}, player {player},")
            for player in (self._seat, *self._agents)
        ]
        for one, its in zip(self._agents.values(), others, strict=True):
            one.agent.add_reward(its * self._source.reward_scale)
        of_player = infos.get(self._seat) if isinstance(infos, Mapping) else None
        return reward * self._source.reward_scale, plain(of_player) if isinstance(of_player, Mapping) else {}

    def _hidden(self, player: int, observation: str) -> str:
        """What the game has told a player since the last time, such as why it refuses a move, and the wrappers do not show."""
        wrapper, told = self._game, list[Any]()
        while wrapper is not None:
            kept = getattr(wrapper, "full_observations", None)  # of those wrappers that choose among the messages
            if isinstance(kept, Mapping):
                told = list(kept.get(player, ()))
            wrapper = getattr(wrapper, "env", None)
        new, self._told[player] = told[self._told.get(player, 0) :], len(told)
        texts = [str(message[1]) for message in new if len(message) == 3 and getattr(message[2], "name", "") == _TOLD]
        return "\n".join(text for text in texts if text not in observation)

    def _make_game(self) -> Any:
        with self._random.active():  # some games draw when they are made, as Countdown-v0 its numbers
            return self._source.make_game()

    async def _ask(self, function: Callable[[], Any]) -> Any:
        def ask() -> Any:
            with self._random.active():
                return function()

        return await self._foreign.ask(ask)


@dataclass(frozen=True, slots=True)
class _Seen:
    """An observation."""

    text: str
    """What the wrappers show."""
    hidden: str = ""
    """What the game has told the player, too."""


class _View:
    """What a player has been shown of a game."""

    def __init__(self) -> None:
        self._shown = ""
        """What the wrappers have shown so far, if they repeat it."""

    def new(self, seen: _Seen, move: str | None = None) -> str:
        """What is new in an observation, behind what the wrappers hide."""
        parts = [seen.hidden.strip("\n"), self._part(seen.text, move)]
        return "\n\n".join(part for part in parts if part) or "(nothing new)"

    def _part(self, observation: str, move: str | None) -> str:
        """The part of an observation that was not shown before, without the model's own move at its beginning."""
        before, self._shown = self._shown, observation
        if not before or not observation.startswith(before):
            return observation.strip("\n")
        new = observation[len(before) :]
        if move:
            label, bracket, rest = new.lstrip("\n").partition("] ")
            for own in (move, f"[{move}]"):
                if bracket and label.startswith("[") and rest.startswith(own):
                    new = rest[len(own) :]
                    break
        return new.strip("\n")


@dataclass(slots=True)
class _AgentPlayer:
    """A player that is an agent of the episode."""

    agent: EpisodeAgent
    view: _View
    move: str = ""
    """Its last one."""


class _OwnRandom:
    """States of the global random generators that belong to one game."""

    _turn = threading.Condition()
    _holder: ClassVar[_OwnRandom | None] = None
    """Whose states are set."""

    def __init__(self, seed: int) -> None:
        self.of_opponent = random.Random(f"opponent {seed}")
        """What an opponent that is a function draws from: never a global generator."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % (1 << 32)).get_state()
        self._before: tuple[Any, Any]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Set the states, and keep what they become. Raises TimeoutError if the call of another game does not return."""
        with self._turn:
            if not self._turn.wait_for(lambda: _OwnRandom._holder is None, timeout=_WAIT):
                raise TimeoutError(f"a call of another game of TextArena has not returned for {_WAIT:g} s")
            _OwnRandom._holder = self
            self._before = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Set the states that were there before, if these are set: also for a call that hangs, so that other games go on."""
        with self._turn:
            if _OwnRandom._holder is self:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(self._before[0])
                np.random.set_state(self._before[1])
                _OwnRandom._holder = None
                self._turn.notify()


# opponents


@dataclass(frozen=True, slots=True)
class _OfEpisode:
    """Agents of the episode are the other players."""

    policy: str | None
    """Null: the model's own."""


def _opponent(given: str | Callable[..., Any] | Mapping[str, Any]) -> Opponent | _OfEpisode:
    """What makes the moves of the other players. Raises ConfigError."""
    if given == "random":
        return _random_move
    if given == "self":
        return _OfEpisode(None)
    if isinstance(given, Mapping):
        return _model(given)
    function = referred(given, "opponent")

    def move(observation: str, draws: random.Random) -> Any:
        return function(observation)

    return move


def _random_move(observation: str, draws: random.Random) -> str:
    """One of the moves in brackets of the last lines that have any."""
    lines = [
        found
        for line in observation.splitlines()
        if (found := [move for move in _MOVE.findall(line) if not re.fullmatch(r"\[(GAME|Player.*)\]", move)])
    ]
    if not lines:
        raise ValueError(
            "opponent: random found no move in brackets in the observation; use a function as opponent. The observation ends "
            f"with {observation[-200:]!r}"
        )
    return draws.choice(lines[-1])


def _model(given: Mapping[str, Any]) -> Opponent | _OfEpisode:
    unknown = next((key for key in given if key not in _OPPONENT_KEYS), None)
    if unknown is not None:
        raise ConfigError(
            f"environment.arguments.opponent has no option {unknown!r}{nearest(unknown, _OPPONENT_KEYS)}; it has "
            f"{', '.join(_OPPONENT_KEYS)}"
        )
    if "policy" in given:
        if len(given) > 1 or not isinstance(given["policy"], str):
            raise ConfigError(
                f"environment.arguments.opponent is {dict(given)!r:.200}; `policy` names a policy of the recipe, and stands "
                f"alone"
            )
        return _OfEpisode(given["policy"])
    key = "environment.arguments.opponent.chat_model"
    chat: ChatModel = given_chat_model(given.get("endpoint"), given.get("chat_model"), owner="opponent", key=key)
    system = str(given.get("system_prompt", _PLAYER))

    async def move(observation: str, draws: random.Random) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": observation}]
        return await ask_chat_model(chat, messages, name="the opponent", kind="environment")

    return move


def _data_hint(failed: Failed) -> str:
    """What to do about data of nltk, which some games load from the network."""
    if not isinstance(failed.__cause__, LookupError):
        return ""
    return " This game reads data of nltk: download them once, on a machine with a network (python -m nltk.downloader words)"
