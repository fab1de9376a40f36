"""What both kinds of session do with an environment's reply: check it, and write what it says of the turns.

Nothing of a reply is applied before all of it is checked. Each check raises TypeError or ValueError with the value, the rule and
the fix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from turnwise.json_yaml import half_character
from turnwise.types import (
    EarlierHistory,
    Edit,
    Message,
    Opening,
    Reply,
    Resume,
    SamplingChange,
    ToolOutcome,
    ToolSchema,
    Trajectory,
    Turn,
)
from turnwise.user_code.reward_number import reward_number

__all__ = ["annotate_turns", "check_opening", "check_reply", "presentable", "turn_seed"]


def annotate_turns(trajectory: Trajectory, turn: Turn, reply: Reply, *, source: str = "environment") -> None:
    """Check a reply to `turn`, the last turn, and write what it says of the turns: reward (as a part with the name `source`),
    info, outcomes, `observed`, `train_on`, and its metrics.

    Raises TypeError or ValueError, with nothing written.
    """
    check_reply(reply, turn, trajectory.turns)
    turn.add_reward(reward_number(reply.reward, "Reply(reward=...)"), source)
    turn.observed = reply.observation or (turn.observed and source == "final_reward")
    turn.info.update(reply.info)
    turn.outcomes = tuple(reply.outcomes) or turn.outcomes
    for name, value in reply.metrics.items():
        trajectory.metrics[name] = trajectory.metrics.get(name, 0.0) + value
    for index in reply.train_on:
        trajectory.turns[index].train_on = True


def presentable(turn: Turn, messages: Sequence[Message], present: Callable[[Message], Message]) -> list[Message]:
    """The messages of a reply, with those of tools in the form that the model can receive (`present`).

    An image that the model cannot receive becomes an error text. The call's outcome then says so too.
    """
    presented = [present(message) if message["role"] == "tool" else message for message in messages]
    errors = {
        str(new.get("tool_call_id")): str(new["content"])
        for old, new in zip(messages, presented, strict=True)
        if isinstance(old.get("content"), list | tuple) and isinstance(new["content"], str)
    }
    turn.outcomes = tuple(
        replace(outcome, content=errors[outcome.id], error="raised") if outcome.id in errors else outcome
        for outcome in turn.outcomes
    )
    return presented


def check_opening(opening: Opening) -> None:
    """Raises TypeError or ValueError."""
    if not opening.messages:
        raise ValueError("the environment's Opening has no messages; there is nothing to answer")
    _check_messages(opening.messages)
    if opening.prompt_ids is not None:
        _check_prompt(opening.prompt_ids, "Opening")
    if opening.sampling is not None:
        _check_sampling(opening.sampling, "Opening")
    if opening.chat_template_kwargs is not None:
        _check_template_arguments(opening.chat_template_kwargs, "Opening")


def check_reply(reply: Reply, turn: Turn, turns: Sequence[Turn]) -> None:
    """Check a reply to `turn`, the last of `turns`. Raises TypeError or ValueError."""
    if not isinstance(reply, Reply):
        raise TypeError(f"the environment answered with a {type(reply).__name__}; step must return a Reply")
    for messages in (reply.rewrite or (), reply.messages):
        _check_messages(messages)
    _check_types(reply)
    if reply.done:
        _check_done(reply)
    if reply.resume is not None:
        _check_resume(reply, reply.resume, turn)
    if reply.edit is not None:
        _check_edit(reply, reply.edit, turn)
    if reply.returns_to is not None:
        _check_return(reply, reply.returns_to)
    for index, positions in reply.masked.items():
        _check_masked(index, positions, turns)
    for index in reply.train_on:
        if index not in range(len(turns)):
            raise ValueError(f"Reply(train_on=[{index}]): {_no_turn(index, turns)}")


def _check_types(reply: Reply) -> None:
    if not isinstance(reply.info, Mapping):
        raise TypeError(f"Reply(info={reply.info!r:.80}): info must be a dictionary")
    if not isinstance(reply.prefill, str):
        raise TypeError(f"Reply(prefill={reply.prefill!r:.80}): prefill must be a text")
    if (problem := half_character(reply.prefill)) is not None:
        raise ValueError(f"Reply(prefill=...) cannot be encoded: {problem}")
    if not isinstance(reply.masked, Mapping):
        raise TypeError(f"Reply(masked={reply.masked!r:.80}): masked must be a dictionary of token positions by turn")
    for outcome in reply.outcomes:
        if not isinstance(outcome, ToolOutcome):
            raise TypeError(f"Reply(outcomes=...): one of them is {outcome!r:.80}; each must be a ToolOutcome")
    if reply.resume is not None and not (isinstance(reply.resume, Resume) and isinstance(reply.resume.add, str)):
        raise TypeError(f"Reply(resume={reply.resume!r:.80}): give Resume(keep=..., add='...')")
    if reply.resume is not None and (problem := half_character(reply.resume.add)) is not None:
        raise ValueError(f"Resume(add=...) cannot be encoded: {problem}")
    if not isinstance(reply.metrics, Mapping):
        raise TypeError(f"Reply(metrics={reply.metrics!r:.80}): metrics must be a dictionary of numbers")
    for name, value in reply.metrics.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not isinstance(name, str) or not number:
            raise TypeError(
                f"Reply(metrics={{{name!r:.80}: {value!r:.80}}}): the name must be a text and the value a finite number"
            )
    if reply.tools is not None:
        _check_tools(reply.tools)
    if reply.sampling is not None:
        _check_sampling(reply.sampling, "Reply")
    if reply.prompt_ids is not None:
        _check_prompt(reply.prompt_ids, "Reply")
    if reply.chat_template_kwargs is not None:
        _check_template_arguments(reply.chat_template_kwargs, "Reply")


def _check_done(reply: Reply) -> None:
    """A last reply has nothing that only a following turn could use."""
    if reply.prefill:
        raise ValueError(
            f"Reply(prefill={reply.prefill!r:.80}, done=True): there is no following turn; leave one of them out"
        )
    if reply.sampling is not None:
        raise ValueError("Reply(sampling=..., done=True): there is no following turn; leave one of them out")
    if reply.tools is not None:
        raise ValueError("Reply(tools=..., done=True): there is no following turn; leave one of them out")
    if reply.prompt_ids is not None:
        raise ValueError("Reply(prompt_ids=..., done=True): there is no following turn; leave one of them out")
    if reply.chat_template_kwargs is not None:
        raise ValueError(
            "Reply(chat_template_kwargs=..., done=True): there is no following turn; leave one of them out"
        )


def _check_resume(reply: Reply, resume: Resume, turn: Turn) -> None:
    """A resumed turn continues in its segment, so nothing may come before its next token but the text of the resume."""
    if reply.messages or reply.done or reply.prefill or reply.rewrite is not None:
        raise ValueError(
            "a Reply with `resume` continues the model's turn, so it has no messages, no rewrite and no prefill, and is not done"
        )
    if reply.tools is not None:
        raise ValueError(
            "Reply(resume=..., tools=...): the prompt of the resumed turn already lists the present tools; change the tools in "
            "the reply to the complete turn"
        )
    if reply.prompt_ids is not None:
        raise ValueError(
            "Reply(resume=..., prompt_ids=...): the prompt says already what is kept of the turn; remove resume"
        )
    if reply.chat_template_kwargs is not None:
        raise ValueError(
            "Reply(resume=..., chat_template_kwargs=...): the prompt of the resumed turn is rendered already; change the "
            "arguments in the reply to the complete turn"
        )
    keep = resume.keep
    if keep is not None and not 0 <= keep <= len(turn.text):
        raise ValueError(
            f"Resume(keep={keep}) of an answer of {len(turn.text)} characters; keep 0 to {len(turn.text)} of it"
        )


def _check_edit(reply: Reply, edit: Edit, turn: Turn) -> None:
    """An edited turn stays in its segment, and new messages follow it."""
    if not isinstance(edit, Edit) or not isinstance(edit.add, str):
        raise TypeError(f"Reply(edit={edit!r:.80}): give Edit(keep=..., add='...')")
    if reply.rewrite is not None or reply.resume is not None or reply.done:
        raise ValueError(
            "a Reply with `edit` changes the last turn, and the conversation continues behind that turn: it has no rewrite and "
            "no resume, and is not done"
        )
    if reply.prompt_ids is not None:
        raise ValueError(
            "Reply(edit=..., prompt_ids=...): the prompt says already what is kept of the turn; remove edit"
        )
    if not isinstance(edit.keep, int) or isinstance(edit.keep, bool) or not 0 <= edit.keep <= len(turn.text):
        raise ValueError(
            f"Edit(keep={edit.keep!r:.80}) of an answer of {len(turn.text)} characters; keep 0 to {len(turn.text)} of it"
        )


def _check_return(reply: Reply, returns_to: EarlierHistory) -> None:
    """A return names a part of the rewritten history."""
    if not isinstance(returns_to, EarlierHistory):
        raise TypeError(f"Reply(returns_to={returns_to!r:.80}): give EarlierHistory(index=..., first_new=...)")
    # a prompt of tokens may continue the history directly behind the model's turn, with no new message
    most = len(reply.rewrite or ()) + (reply.prompt_ids is not None)
    if reply.rewrite is None or not 0 < returns_to.first_new < most:
        raise ValueError(
            f"Reply(returns_to={returns_to!r:.80}): `rewrite` must have the complete history, with new messages from first_new on"
        )


def _check_sampling(change: SamplingChange, where: str) -> None:
    if not isinstance(change, SamplingChange):
        raise TypeError(f"{where}(sampling={change!r:.80}): give SamplingChange(max_tokens=..., stop=[...])")
    most, stop = change.max_tokens, change.stop
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ValueError(
            f"SamplingChange(max_tokens={most!r:.80}): max_tokens must be an integer of at least 1; None is the recipe's limit"
        )
    if stop is not None and not (
        isinstance(stop, list | tuple) and all(isinstance(text, str) and text for text in stop)
    ):
        raise ValueError(f"SamplingChange(stop={stop!r:.80}): stop must be a list of texts that are not empty")
    if not _are_token_ids(change.stop_token_ids):
        raise ValueError(f"SamplingChange(stop_token_ids={change.stop_token_ids!r:.80}): give a list of token ids")


def _check_prompt(prompt: Sequence[int], where: str) -> None:
    if not prompt or not _are_token_ids(prompt):
        raise ValueError(f"{where}(prompt_ids={prompt!r:.80}): give a list of token ids, at least one")


def _are_token_ids(values: object) -> bool:
    return isinstance(values, list | tuple) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _check_template_arguments(arguments: Mapping[str, Any], where: str) -> None:
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise TypeError(
            f"{where}(chat_template_kwargs={arguments!r:.80}): give a dictionary of the template's arguments, such as "
            f"{{'enable_thinking': False}}"
        )


def _check_tools(tools: Sequence[ToolSchema]) -> None:
    if not isinstance(tools, list | tuple):
        raise TypeError(f"Reply(tools={tools!r:.80}): tools must be a list of schemas; an empty list offers no tool")
    names: list[str] = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise TypeError(
                f"Reply(tools=...): one of them is {tool!r:.80}; each must be a schema in the OpenAI format: "
                f"{{'type': 'function', 'function': {{'name': ..., 'description': ..., 'parameters': ...}}}}"
            )
        if name in names:
            raise ValueError(f"Reply(tools=...): two tools have the name {name!r}; the names must differ")
        if (problem := half_character(tool)) is not None:
            raise ValueError(f"the schema of the tool {name!r} cannot be encoded: {problem}")
        names.append(name)


def _check_masked(index: int, positions: Collection[int], turns: Sequence[Turn]) -> None:
    if index not in range(len(turns)):
        raise ValueError(f"Reply(masked={{{index}: ...}}): {_no_turn(index, turns)}")
    completion = turns[index].completion
    count = 0 if completion is None else len(completion.token_ids)
    if wrong := [position for position in positions if position not in range(count)]:
        raise ValueError(
            f"Reply(masked={{{index}: {wrong[:3]}}}): turn {index} sampled {count} tokens, 0 to {count - 1}"
        )


def _no_turn(index: int, turns: Sequence[Turn]) -> str:
    return f"there is no turn {index}; the turns are 0 to {len(turns) - 1}"


def _check_messages(messages: Sequence[Message]) -> None:
    if isinstance(messages, Iterator):  # it could be read only once
        raise TypeError(f"messages must be a list; got a {type(messages).__name__}: put list(...) around it")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TypeError(
                f"messages must be a list of {{'role': ..., 'content': ...}}; one of them is {message!r:.80}"
            )
        if (problem := half_character(message)) is not None:
            raise ValueError(f"a message with the role {message['role']!r} cannot be encoded: {problem}")


def turn_seed(seed: int, index: int) -> int:
    """The seed of a turn's random stream: the finaliser of splitmix64."""
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (value ^ (value >> 31)) & 0x7FFFFFFFFFFFFFFF
