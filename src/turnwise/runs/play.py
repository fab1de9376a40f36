"""`turnwise play`: a person takes the turns of the model, in one conversation on a row of a recipe.

The loop, the session, the environment and the rewards are those of a run; only the engine asks a person. The person sees what
the model would see: the prompt as text or as tokens. The model of the recipe is loaded when it is asked for a turn.

A turn is taken back by beginning the conversation again with the turns before it, because an environment has no way back. An
environment that answers these differently is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from turnwise import assembly
from turnwise.chat.probes import assistant_message
from turnwise.chat.renderer import Renderer
from turnwise.engines.engine import Engine, closing
from turnwise.engines.scripted import AskingEngine
from turnwise.errors import ConfigError, DataError, TemplateError, TurnwiseError, counted, nearest
from turnwise.json_yaml import parse_json, parse_yaml
from turnwise.options.schema import Config
from turnwise.rollout.context import ConversationContext, turn_seed
from turnwise.rollout.rollout import new_group, rollout_group
from turnwise.runs.replay import known_context
from turnwise.runs.sampling_only import SamplingRun, prepare
from turnwise.terminal.conversation import end_story, turn_story, with_bars
from turnwise.terminal.report import printable
from turnwise.terminal.typed_lines import Lines
from turnwise.types import Completion, Group, Media, Request, Row, ToolSchema, Trajectory

COMMANDS = {
    "/call": "/call NAME ARGUMENTS: call a tool; ARGUMENTS are a JSON object, or name=value",
    "/model": "/model: let the model of the recipe take this turn",
    "/undo": "/undo: take back the last turn",
    "/again": "/again: begin the conversation again",
    "/tools": "/tools: show the tools that are offered",
    "/tokens": "/tokens: show every token of the prompt",
    "/save": "/save FILE: append the conversation as a row for `turnwise sft`",
    "/script": "/script FILE: append the turns as a script for engine.name=scripted",
    "/quit": "/quit: leave",
}
"""What is typed in place of a turn, and what each does."""
_HELP = 'type a turn of the model; """ alone on a line begins and ends a turn of several lines. Instead of a turn:'
_BLOCK = '"""'
_STYLE = "dim"


def completions(line: str, tools: Sequence[ToolSchema]) -> list[str]:
    """The words that may stand at the end of a typed line: commands, names of tools, and arguments of a tool as `name=`."""
    *before, last = line.split(" ")
    words = [word for word in before if word]
    schemas = _parameters(tools)
    if not words:
        return [f"{command} " for command in COMMANDS if command.startswith(last)] if last.startswith("/") else []
    if words[0] != "/call":
        return []
    if len(words) == 1:
        return [f"{name} " for name in schemas if name.startswith(last)]
    given = {word.partition("=")[0] for word in words[2:]}
    names = [name for name in schemas.get(words[1], ()) if name not in given]
    return [f"{name}=" for name in names if name.startswith(last)]


def _parameters(tools: Sequence[ToolSchema]) -> dict[str, list[str]]:
    """The names of the tools, each with the names of its parameters."""
    found: dict[str, list[str]] = {}
    for tool in tools:
        function: Mapping[str, Any] = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        found[str(function.get("name"))] = list(parameters.get("properties") or {})
    return found


def typed_arguments(text: str) -> dict[str, Any]:
    """The arguments of a typed call: a JSON object, or words `name=value` whose values are YAML.

    Example: `a=2 b="two words"` gives `{"a": 2, "b": "two words"}`. Raises ConfigError.
    """
    text = text.strip()
    if text.startswith("{"):
        value = parse_json(text, where="the arguments of the call", error=ConfigError, own=True)
        if not isinstance(value, dict):
            raise ConfigError("the arguments of the call must be a JSON object")
        return value
    arguments: dict[str, Any] = {}
    for word in _words(text):
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise ConfigError(f"{word!r} is no argument: write name=value for each, or all as one JSON object")
        arguments[name] = parse_yaml(value, where=f"the argument {name}", error=ConfigError) if value else ""
    return arguments


def _words(text: str) -> Iterator[str]:
    """The words of a text; spaces inside quotes and brackets do not separate them."""
    word, quote, depth = "", "", 0
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == " " and not quote and depth <= 0:
            if word:
                yield word
            word = ""
        else:
            word += character
    if word:
        yield word


def call_text(renderer: Renderer, name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSchema]) -> str:
    """What the model writes to call a tool, without the stop token. Raises ConfigError if it cannot be written."""
    call = {"type": "function", "id": "call_0", "function": {"name": name, "arguments": dict(arguments)}}
    parser = renderer.turn_parser
    with contextlib.suppress(TemplateError):
        text = renderer.template.completion_text({**assistant_message(""), "tool_calls": [call]}, tools=tools)
        ids = renderer.encode(text)
        stops = frozenset(renderer.stop_token_ids)
        end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
        opening = renderer.profile.reasoning.marks.reasoning_opening(text)
        read = parser.parse(ids[:end], tools=tools, reasoning_opening=opening)
        if [(one.name, dict(one.arguments)) for one in read.calls if one.error is None] == [(name, dict(arguments))]:
            return renderer.decode(ids[:end])
    raise ConfigError(
        f"the chat template does not write calls in the format that is parsed: type the call as the model writes it, such as "
        f"{parser.tool_format.example}"
    )


# a conversation

_Wish = Literal["undo", "again", "quit"]


class _Model:
    """The recipe's engine, which is started when it is first asked. Also answers reward functions that ask the engine."""

    def __init__(self, config: Config, renderer: Renderer, say: Callable[[str], None]) -> None:
        self._config = config
        self._renderer = renderer
        self._say = say
        self._engine: Engine | None = None

    async def generate(self, request: Request) -> Completion:
        """Raises EngineError or ConfigError."""
        if self._engine is None:
            self._say(f"starting the engine {self._config.engine.name} with {self._config.model.path}")
            engine = assembly.engine(self._config, self._renderer, assembly.engine_model(self._config))
            await engine.start()
            self._engine = engine
        return await self._engine.generate(request)

    def release(self, conversation: str) -> None:
        if self._engine is not None:
            self._engine.release(conversation)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


@dataclass(frozen=True, slots=True)
class _Taken:
    """A turn of the conversation so far."""

    prompt: Sequence[int]
    """Token ids, those of earlier turns included."""
    completion: Completion


@dataclass(slots=True)
class _Attempt:
    """The conversation from its beginning, with the turns that are given again."""

    trajectory: Trajectory
    """Filled by the session."""
    number: int
    """From 0."""
    given: Sequence[_Taken]
    wish: asyncio.Future[_Wish]
    """What the person wants instead of a turn."""
    prompts: list[Sequence[int]] = field(default_factory=list)
    """The token ids of the prompt of each turn."""
    told: int = 0
    """Turns that are on the screen."""

    def taken(self) -> list[_Taken]:
        pairs = zip(self.prompts, self.trajectory.turns, strict=False)
        return [_Taken(prompt, turn.completion) for prompt, turn in pairs if turn.completion is not None]

    def shown(self) -> Sequence[int]:
        """The tokens that are on the screen: those of the last prompt and of the turn after it."""
        taken = self.taken()
        return [*taken[-1].prompt, *taken[-1].completion.token_ids] if taken else ()


class Player:
    """A person who takes the turns of the model. `tokens`: show prompts as tokens instead of text."""

    def __init__(self, console: Console, lines: Lines, renderer: Renderer, model: _Model, *, tokens: bool) -> None:
        self._console = console
        self._lines = lines
        self._renderer = renderer
        self._model = model
        self._tokens = tokens
        self._attempt: _Attempt | None = None

    def say(self, *lines: str, style: str | None = None) -> None:
        """Print lines, with control characters as escapes."""
        for line in lines:
            self._console.print(printable(line), style=style, highlight=False, markup=False, soft_wrap=True)

    @property
    def attempt(self) -> _Attempt:
        assert self._attempt is not None, "a turn is asked for while no conversation runs"
        return self._attempt

    # the conversation

    async def play(self, group: Group, context: ConversationContext, score: Score) -> _Wish:
        """Run the conversation of `group`, after `/undo` with the turns that were not taken back. Returns what the person wants
        next."""
        before, wish = self._attempt, asyncio.get_running_loop().create_future()
        given: Sequence[_Taken] = ()
        if before is not None and before.wish.result() == "undo":
            given = before.taken()[:-1]
        (trajectory,) = group.trajectories
        self._attempt = attempt = _Attempt(trajectory, 0 if before is None else before.number + 1, given, wish)
        task = asyncio.ensure_future(rollout_group(group, context))
        try:
            await asyncio.wait({task, wish}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
            self._model.release(trajectory.id)
        if not wish.done():
            await score(trajectory)
            self._show_end(trajectory)
            await self._after_the_end(attempt)
        return wish.result()

    async def _after_the_end(self, attempt: _Attempt) -> None:
        while not attempt.wish.done():
            line = await self._lines.read("end> ", lambda typed: completions(typed, ()))
            if line is None:
                attempt.wish.set_result("quit")
            elif line.strip() and not self._command(line):
                self.say("the conversation has ended: /undo, /again, /save, /script or /quit", style="yellow")

    async def answer(self, request: Request) -> str | Completion:
        """The next turn: one that is given again, the person's or the model's. The model takes the turns of agents that the
        environment has opened."""
        attempt = self.attempt
        if request.conversation != attempt.trajectory.id:
            self._show_turns(attempt)
            self.say(f"the environment asks the agent {request.conversation}", style=_STYLE)
            return await self._model.generate(request)
        index = len(attempt.prompts)
        before = attempt.shown()
        attempt.prompts.append(list(request.token_ids))
        if index < len(attempt.given):
            given = attempt.given[index]
            if given.prompt != attempt.prompts[-1]:
                self.say(f"this time, the environment has answered differently before turn {index}", style="yellow")
            attempt.told = index + 1
            return given.completion
        self._show_turns(attempt)
        self._show_prompt(request, before)
        while True:
            line = await self._lines.read("> ", lambda typed: completions(typed, attempt.trajectory.tools))
            turn = None if line is None else await self._typed(line, request)
            if line is None:
                self.say(f"the input is over, and the conversation is in turn {index}", style="yellow")
                attempt.wish.set_result("quit")
            if attempt.wish.done():
                await asyncio.Event().wait()  # `play` cancels this conversation
            if turn is not None:
                return turn

    async def _typed(self, line: str, request: Request) -> str | Completion | None:
        """The turn that a line says; None if there is none."""
        word, _, rest = line.strip().partition(" ")
        if word == _BLOCK and not rest:
            return await self._block()
        try:
            if word == "/call":
                name, _, arguments = rest.strip().partition(" ")
                return self._call(name, arguments)
            if word == "/model":
                # the same turn again would be the same text
                seed = turn_seed(request.seed, self.attempt.number) if self.attempt.number else request.seed
                return await self._model.generate(dataclasses.replace(request, seed=seed))
        except TurnwiseError as error:
            self.say(str(error), style="red")
            return None
        if word == "/tokens":
            self._show_tokens(request, 0)
            return None
        return None if not word or self._command(line) else line

    async def _block(self) -> str:
        lines: list[str] = []
        while (line := await self._lines.read("... ")) is not None and line.strip() != _BLOCK:
            lines.append(line)
        return "\n".join(lines)

    def _call(self, name: str, arguments: str) -> str:
        """The text of a call. A call that the environment must refuse may be typed, too. Raises ConfigError."""
        tools = self.attempt.trajectory.tools
        if not tools:
            raise ConfigError("no tools are offered")
        if name not in (known := _parameters(tools)):
            self.say(
                f"there is no tool {name!r}{nearest(name, known)}; the tools are: {', '.join(known)}", style="yellow"
            )
        return call_text(self._renderer, name, typed_arguments(arguments), tools)

    # commands

    def _command(self, line: str) -> bool:
        """Do what a command says. False: the line is none."""
        word, _, rest = line.strip().partition(" ")
        attempt, file = self.attempt, rest.strip()
        match word:
            case "/undo" if not attempt.trajectory.turns:
                self.say("there is no turn to take back", style="yellow")
            case "/undo" | "/again" | "/quit":
                attempt.wish.set_result("undo" if word == "/undo" else "again" if word == "/again" else "quit")
            case "/tools":
                self.say(*(json.dumps(tool, ensure_ascii=False) for tool in attempt.trajectory.tools or ()))
            case "/save" | "/script" if not file:
                self.say(f"name the file: {word} FILE", style="yellow")
            case "/save" | "/script":
                self._write(Path(file), as_row=word == "/save")
            case "/help":
                self.say(_HELP, *(f"  {text}" for text in COMMANDS.values()), style=_STYLE)
            case _ if word.startswith("/") and word not in COMMANDS:
                self.say(f"{word} is no command{nearest(word, COMMANDS) or '.'} {_HELP}", style="yellow")
                self.say(*(f"  {text}" for text in COMMANDS.values()), style=_STYLE)
            case _:
                return False
        return True

    def _write(self, file: Path, *, as_row: bool) -> None:
        trajectory = self.attempt.trajectory
        if not trajectory.turns:
            self.say("there is no turn yet", style="yellow")
            return
        value = sft_row(trajectory) if as_row else [turn.text for turn in trajectory.turns]
        try:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(value, ensure_ascii=False) + "\n")
        except (OSError, TypeError, ValueError) as error:  # a place that cannot be written; an image
            self.say(f"{file} was not written: {error}", style="red")
            return
        what = "as a row for `turnwise sft`" if as_row else "as a script for engine.name=scripted"
        self.say(f"{file}: appended {counted(len(trajectory.turns), 'turn')} {what}", style=_STYLE)
        if trajectory.stop is None:
            self.say(
                f"the conversation is not finished: this {'row' if as_row else 'script'} ends after turn "
                f"{trajectory.turns[-1].index}. Repeat the command at its end for all turns, which appends another line",
                style="yellow",
            )

    # what the model sees, and what the environment says

    def _show_turns(self, attempt: _Attempt) -> None:
        """The turns that are not on the screen: what was parsed, results of tools, rewards."""
        for turn in attempt.trajectory.turns[attempt.told :]:
            self.say(f"turn {turn.index}:", *turn_story(attempt.trajectory, turn), style=_STYLE)
        attempt.told = len(attempt.trajectory.turns)

    def _show_prompt(self, request: Request, shown: Sequence[int]) -> None:
        """What the model sees, as far as it is new."""
        begin = len(shown) if list(request.token_ids[: len(shown)]) == list(shown) else 0
        if begin == 0 and shown:
            self.say("a new segment begins: the model sees this prompt instead of the one before", style="yellow")
        if begin == 0 and (tools := _parameters(self.attempt.trajectory.tools)):
            self.say("tools: " + ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in tools.items()))
        if self._tokens:
            self._show_tokens(request, len(self.attempt.prompts[-2]) if begin else 0)  # with those of the last turn
            return
        self.say(f"the model sees tokens {begin} to {len(request.token_ids) - 1}:", style=_STYLE)
        self.say(*with_bars(self._text(request, begin), whole=True))

    def _show_tokens(self, request: Request, begin: int) -> None:
        ids = request.token_ids
        for place in range(begin, len(ids)):
            text = json.dumps(self._renderer.decode([ids[place]]), ensure_ascii=False)
            special = "  (control token)" if self._renderer.is_special(ids[place]) else ""
            self.say(f"  {place:>5} {ids[place]:>7}  {text}{special}")

    def _text(self, request: Request, begin: int) -> str:
        """The text of the prompt from a token on. An image or a video is one word."""
        parts: list[str] = []
        media: Sequence[Media] = [one for one in request.media if one.start >= begin]
        for one in sorted(media, key=lambda one: one.start):
            parts += [self._renderer.decode(request.token_ids[begin : one.start]), f"<{one.kind}: {one.length} tokens>"]
            begin = one.start + one.length
        return "".join([*parts, self._renderer.decode(request.token_ids[begin:])])

    def _show_end(self, trajectory: Trajectory) -> None:
        self._show_turns(self.attempt)
        last = trajectory.turns[-1].message_index if trajectory.turns else None
        after = len(trajectory.messages) if last is None else last + 1
        for message in trajectory.messages[after:]:
            content = message.get("content")
            self.say(f"message, {message['role']}:")
            self.say(*with_bars(content if isinstance(content, str) else json.dumps(content, default=str)))
        self.say(*end_story(trajectory), style="red" if trajectory.failed else None)


def sft_row(trajectory: Trajectory) -> dict[str, Any]:
    """The conversation up to the model's last turn, as a row for `turnwise sft`."""
    messages = list(trajectory.messages)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    row: dict[str, Any] = {"messages": messages}
    if trajectory.tools:
        row["tools"] = list(trajectory.tools)
    if trajectory.row.chat_template_kwargs:
        row["chat_template_kwargs"] = dict(trajectory.row.chat_template_kwargs)
    return row


# the command

Score = Callable[[Trajectory], Awaitable[Sequence[Trajectory]]]


_NAMED = 5
"""Ids of rows in a message."""


async def play(config: Config, row_id: str | None, console: Console, lines: Lines, *, tokens: bool = False) -> bool:
    """Let a person play on the row of `data.train` with this id, or on the first one. Returns whether the last conversation
    failed.

    Raises TurnwiseError.
    """
    if config.engine.endpoint is not None:
        raise ConfigError(
            "engine.name=openai: an endpoint renders the prompt itself, so nothing can be shown of it. Play with the model's "
            "tokenizer: engine.name=local model.path=<a model directory or hub name>"
        )
    if (option := config.runs_conversations_elsewhere) is not None:
        raise ConfigError(f"the conversation is played in this process, and {option} runs it in others: remove it")
    config = config.model_copy(update={"deterministic": False})  # one conversation, at the person's pace
    conversations = prepare(config, assembly.sampling(config))
    assert conversations.renderer is not None
    row, notes = _row(conversations, row_id)
    renderer = conversations.renderer.for_arguments(row.chat_template_kwargs)
    model = _Model(config, conversations.renderer, lambda text: player.say(text, style=_STYLE))
    player = Player(console, lines, renderer, model, tokens=tokens)
    player.say(*conversations.notes, *notes, style=_STYLE)
    player.say(f"row {row.id} of data.train; /help lists the commands", style=_STYLE)
    engine = AskingEngine(
        player.answer,
        encode=renderer.encode,
        encode_behind=renderer.encode_continuation,
        stop_token_id=renderer.stop_token_ids[0],
    )
    environments = assembly.environment_factory(config, encode=renderer.encode)
    async with contextlib.aclosing(environments), closing(model):
        assembly.connect_engine(conversations.scorer, model, renderer)
        context = assembly.rollout_context(
            config,
            conversations.renderer,
            engine,
            environments,
            longest=known_context(config.model.path),
            policies=assembly.agent_policies(config, conversations.renderer, None),
        )
        while True:
            group = new_group(row, size=1, seed=config.seed)
            if await player.play(group, context, conversations.scorer.scoring_callback([group])) == "quit":
                return group.trajectories[0].failed


def _row(conversations: SamplingRun, row_id: str | None) -> tuple[Row, list[str]]:
    """The row with this id, or the first one, and notes on it. Raises DataError if there is none, or if its prompt is too
    long."""
    rows = assembly.rows(conversations.config, limit=1 if row_id is None else None)
    found = [row for row in rows if row_id in (None, row.id)]
    if not found:
        ids = ", ".join(row.id for row in rows[:_NAMED]) + (", ..." if len(rows) > _NAMED else "")
        raise DataError(f"--row {row_id}: no row of data.train has this id; the ids of its {len(rows)} rows are {ids}")
    kept, notes = conversations.keep_rows(found)
    if not kept:
        raise DataError(f"--row {found[0].id}: {' '.join(notes)}")
    (row,) = conversations.process(kept)
    return row, notes
