"""A request of an agent for a turn, and its answer, in a form that does not depend on the API of the client.

Messages are in the OpenAI format, with the arguments of tool calls as JSON text, as clients send them; `template_messages`
gives the form that chat templates take. This module knows no HTTP and no tokens.

The recipe decides how tokens are sampled, because training needs all tokens from the same distribution. A client's sampling
parameter therefore has no effect, and is counted. A parameter that would change the form of the answer is refused, and so is
an unknown parameter.

`AgentConversation` holds the requests of one agent: the server's thread puts requests in and waits for their answers, and the
environment takes them out one after the other. All of its methods run in the event loop of the environment.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import json
import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.types import AnswerFormat, Message, SamplingChange, ToolSchema, Turn
from turnwise.user_code.reward_number import added

# requests and answers


class Refused(Exception):
    """A request that is answered with an HTTP error. `parameter` names the part of the request that is wrong, if it is known."""

    def __init__(self, status: int, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.parameter = parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asks for."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    """The tools that the model may call; empty with `tool_choice: none`."""
    sampling: SamplingChange = field(default_factory=SamplingChange)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, such as `{"enable_thinking": False}`: a field of vLLM's and SGLang's servers."""
    forced: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that the client has set and that have no effect, because the recipe decides them: name -> value."""
    stream: bool = False
    stream_usage: bool = False
    """Whether a stream of chat completions ends with the counts of tokens."""
    model: str = "model"
    """The name of the model that the client asked for. The answer repeats it."""
    instructions: Message | None = None
    """Responses API: the system message, which is not part of the stored conversation."""
    previous_response: str | None = None
    """Responses API: the id of the answer that `messages` continue."""
    prompt: str | Sequence[int] | None = None
    """The prompt that the client wrote itself, as text or as token ids (`messages` is empty); None: it is rendered from the
    messages."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """Responses API: parameters that the answer repeats."""
    form: str = ""
    """The parameters that ask for a form of the answer (`SamplingChange.asks_for_form`), for error messages."""

    @property
    def conversation(self) -> list[Message]:
        """All messages that the model answers, the instructions first: without the beginning of its answer (`prefill`)."""
        messages = self.messages[:-1] if self._begins_answer else self.messages
        return [*([self.instructions] if self.instructions is not None else []), *messages]

    @property
    def prefill(self) -> str:
        """The text that the answer begins with: that of the last message, if it is the model's; else empty."""
        return str(self.messages[-1]["content"]) if self._begins_answer else ""

    @property
    def _begins_answer(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """A turn of the model for a client."""

    id: str
    """Letters and digits, without the prefix that each API has."""
    created: int
    """Unix seconds."""
    model: str
    message: Message
    """The assistant message as the client receives it: `content`, and `tool_calls` and `reasoning_content` if there are any."""
    prompt_tokens: int
    completion_tokens: int
    cut: bool = False
    """Whether the client's own limit on tokens has cut the turn."""

    @property
    def text(self) -> str:
        """The content, which may be empty."""
        return str(self.message["content"])

    @property
    def reasoning(self) -> str:
        """The reasoning, or an empty text."""
        return str(self.message.get("reasoning_content") or "")

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls in the OpenAI format."""
        return self.message.get("tool_calls") or ()


def answer_message(turn: Turn, stop: Sequence[str] | None = None, prefill: str = "") -> Message:
    """The assistant message of a turn. The content ends in front of the first of the texts `stop`, and begins behind the text
    `prefill`, which the client has given.

    If no tool call of the turn can be parsed, the calls are part of the content, so that the client sees them.
    """
    calls = [call for call in turn.calls if call.error is None]
    content = str(turn.message.get("content") or "")
    if turn.calls and not calls:
        content = turn.text[turn.text.find(turn.reasoning) + len(turn.reasoning) :] if turn.reasoning else turn.text
    elif prefill:
        content = _behind(content, prefill)
    message: Message = {"role": "assistant", "content": before_stop(content, stop)}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in calls]
    return message


def before_stop(content: str, stop: Sequence[str] | None) -> str:
    """The content in front of the first of the texts `stop`."""
    ends = [at for text in stop or () if (at := content.find(text)) >= 0]
    return content[: min(ends)] if ends else content


def _behind(content: str, prefill: str) -> str:
    """The content of a turn without the text that the client has begun it with, which may be part of its reasoning."""
    for begun in (prefill, prefill.lstrip(), prefill.strip()):
        if begun and content.startswith(begun):
            return content[len(begun) :]
    return content


def tool_call(id: str, name: str, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
    """A tool call in the OpenAI format."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def template_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages as chat templates take them: arguments as objects, and the names of tools in the messages of tools.

    Raises Refused if the arguments of a call are not a JSON object.
    """
    names: dict[str, str] = {}
    converted: list[Message] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [
                {**call, "function": {**call["function"], "arguments": json_object(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            names.update({call["id"]: call["function"]["name"] for call in calls})
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and (name := names.get(message["tool_call_id"])) is not None:
            message = {**message, "name": name}
        converted.append(message)
    return converted


def json_object(text: str) -> dict[str, Any]:
    """The arguments of a tool call. Raises Refused if the text is not a JSON object."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused(400, f"the arguments of a tool call must be a JSON object in a text; they are {text!r:.80}")
    return value


def content_text(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or a list of texts and images if there is an image. Text parts are joined with newlines.

    Raises Refused for parts of other kinds.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(400, f"the content of {where} must be a text or a list of parts; it is {content!r:.80}")
    parts = [_part(part, where) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part["text"], str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal" and isinstance(part["refusal"], str):
        return {"type": "text", "text": part["refusal"]}
    if kind in ("image_url", "input_image"):
        url = part["image_url"]
        return image_part(url["url"] if isinstance(url, Mapping) else url, where)
    raise Refused(400, f"{where} has a part of the type {kind!r:.40}; parts are texts and images")


def image_part(url: Any, where: str) -> dict[str, Any]:
    """An image of a message. Raises Refused unless it is a data URI: nothing is downloaded during a run."""
    if not isinstance(url, str) or not url.startswith("data:image/"):
        raise Refused(400, f"an image of {where} must be a data URI (data:image/png;base64,...); it is {url!r:.60}")
    return {"type": "image", "image": url}


def function_tool(name: Any, description: Any, parameters: Any) -> ToolSchema:
    """The schema of a tool in the OpenAI format. Raises Refused if a part has the wrong type."""
    if not isinstance(name, str) or not name:
        raise Refused(
            400, f"the name of a tool must be a text that is not empty; it is {name!r:.80}", parameter="tools"
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise Refused(400, f"the parameters of the tool {name!r:.80} must be a JSON schema", parameter="tools")
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = str(description)
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def template_arguments(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The field `chat_template_kwargs` of a request. Raises Refused unless it is an object."""
    name = "chat_template_kwargs"
    arguments = body.get(name)
    if arguments is not None and not isinstance(arguments, dict):
        raise Refused(400, f"`{name}` must be an object; it is {arguments!r:.80}", parameter=name)
    return arguments or {}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a client says of calls, in the words of all APIs."""

    tools: Sequence[ToolSchema]
    """Those that the model is offered."""
    required: bool = False
    names: Sequence[str] | None = None
    """The tools that may be called, if not all."""
    single: bool = False
    """Whether a turn has one call at most."""

    @property
    def parameter(self) -> str:
        """The parameter of OpenAI's APIs that asks for a form of calls."""
        return "tool_choice" if self.required or self.names is not None else "parallel_tool_calls"

    def with_parallel(self, parallel: Any) -> ToolChoice:
        """With the parameter `parallel_tool_calls`. Raises Refused unless it is true, false or None."""
        if parallel is not None and not isinstance(parallel, bool):
            raise Refused(
                400, f"parallel_tool_calls={parallel!r:.80} must be true or false", parameter="parallel_tool_calls"
            )
        return replace(self, single=parallel is False and bool(self.tools))

    @classmethod
    def of(cls, tools: Sequence[ToolSchema], choice: Any) -> ToolChoice:
        """Raises Refused if two tools have the same name, or a choice is unknown or names a tool that is not there."""
        offered = [tool["function"]["name"] for tool in tools]
        if len(set(offered)) < len(offered):
            raise Refused(400, f"two tools have the same name; the names are {offered!r:.200}", parameter="tools")
        given: Mapping[str, Any] = choice if isinstance(choice, Mapping) else {"type": choice}
        match given.get("type"):
            case "none":
                return cls(())
            case None | "auto":
                return cls(tools)
            case "required" | "any":
                required, names = True, None
            case "function" | "tool":
                required, names = True, [_chosen_name(given)]
            case "allowed_tools":
                allowed = given.get("allowed_tools", given)
                required, names = allowed.get("mode") == "required", [_chosen_name(one) for one in allowed["tools"]]
                if not names:  # as `none`, or nothing that a turn could be
                    if not required:
                        return cls(())
                    raise Refused(
                        400, f"tool_choice={choice!r:.80} asks for a call of no tool", parameter="tool_choice"
                    )
            case _:
                raise Refused(400, f"tool_choice={choice!r:.80} is not known", parameter="tool_choice")
        if missing := [name for name in names or () if name not in offered] or ([] if tools else ["any tool"]):
            raise Refused(
                400,
                f"tool_choice={choice!r:.80} asks for {missing[0]!r:.80}, and the tools of the request are {offered!r:.200}",
                parameter="tool_choice",
            )
        return cls(tools, required, names)


def _chosen_name(choice: Mapping[str, Any]) -> str:
    """The name of a tool in a `tool_choice`, which OpenAI's chat completions write one level deeper than others."""
    return str(choice.get("function", choice).get("name"))


def answer_form(given: Any, name: str) -> AnswerFormat | None:
    """The form of answers that the parameter `name` asks for; None: free text. Raises Refused."""
    if given is None:
        return None
    try:
        return AnswerFormat.of(given)
    except (ValueError, AttributeError) as error:
        raise Refused(400, f"`{name}`: {error}", parameter=name) from None


# parameters

_FORCED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "seed",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "reasoning",
        "reasoning_effort",
        "thinking",
        "truncation",
        "include",
        "verbosity",
    }
)
"""The recipe or the model decides these."""
_IN_RECIPES = frozenset({"temperature", "top_p", "top_k", "min_p"})
"""Those that have an option of the same name in `sampling`."""
_NEUTRAL = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options",
        "cache_control",
        "inference_geo",
        "client_metadata",
    }
)
"""These change neither the model's answer nor its form."""
_DEFAULTS: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "background": False,
    "modalities": ["text"],
    "functions": [],
    "mcp_servers": [],
}
"""Parameters that are supported with one value only."""
_REASONS: Mapping[str, str] = {
    "n": "a conversation has one answer to each request: send several requests instead",
    "best_of": "a conversation has one answer to each request",
    "logprobs": "log-probabilities are in the record of the run, and are not sent to clients",
    "top_logprobs": "log-probabilities are in the record of the run, and are not sent to clients",
    "functions": "this parameter was replaced by `tools`",
    "function_call": "this parameter was replaced by `tool_choice`",
}
_MOST_STOP_TEXTS = 16
_log = logging.getLogger(__name__)
_logged: set[str] = set()


def forced_parameters(body: Mapping[str, Any], *, read: Collection[str]) -> dict[str, Any]:
    """The parameters of a request that have no effect. `read` are those that the API's own code reads.

    Raises Refused for a parameter that is not supported.
    """
    forced: dict[str, Any] = {}
    for name, value in body.items():
        if name in read or value is None or name in _NEUTRAL:
            continue
        if name in _FORCED:
            forced[name] = value
        elif name not in _DEFAULTS or value != _DEFAULTS[name]:
            reason = _REASONS.get(name, "the parameter is unknown here, and no parameter is ignored: leave it out")
            raise Refused(400, f"{name:.80}={value!r:.80} is not supported: {reason}", parameter=name[:80])
    return forced


def fields_without_effect(body: Mapping[str, Any], known: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """What the parts of a request have and no API reads here: the path of each field, with the beginning of its first value.

    `known` are the fields that are read, and those that change nothing, by the path of the part; parts stand in lists.

    Example: `{"messages.name": "Ada"}` for a message `{"role": "user", "content": "Hi", "name": "Ada"}` if `known` has
    `{"messages": {"role", "content"}}`.
    """
    found: dict[str, Any] = {}
    for path, names in known.items():
        parts: list[Any] = [body]
        for step in path.split("."):
            given = [part.get(step) for part in parts if isinstance(part, Mapping)]
            parts = [one for value in given for one in (value if isinstance(value, list) else [value])]
        for part in parts:
            for name, value in part.items() if isinstance(part, Mapping) else ():
                if name not in names and value not in (None, False, "", [], {}):
                    found.setdefault(
                        f"{path}.{name:.80}", value if isinstance(value, int | float) else f"{value!s:.200}"
                    )
    return found


def sampling_change(
    body: Mapping[str, Any],
    *,
    max_tokens: Collection[str],
    stop: str,
    choice: ToolChoice = ToolChoice(()),
    answer: AnswerFormat | None = None,
) -> SamplingChange:
    """The longest turn and the stop texts that a client asked for, which may be as short as it likes, and the form of the turn.

    `max_tokens` and `stop` are the names of the parameters. Raises Refused if a value has the wrong type.
    """
    most = [body[name] for name in max_tokens if body.get(name) is not None]
    for value in most:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refused(400, f"{max_tokens}={value!r:.80}: the value must be an integer of at least 1")
    texts = body.get(stop)
    texts = [texts] if isinstance(texts, str) else texts
    if texts is not None and not (isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)):
        raise Refused(400, f"{stop}={texts!r:.80} must be a list of texts that are not empty", parameter=stop)
    if texts and len(texts) > _MOST_STOP_TEXTS:
        raise Refused(400, f"{stop} has {len(texts)} texts; at most {_MOST_STOP_TEXTS} are allowed", parameter=stop)
    # a client that asks for few tokens expects the beginning of an answer
    return SamplingChange(
        max_tokens=min(most, default=None),
        stop=texts or None,
        answers_cut=bool(most),
        answer_format=answer,
        tool_choice="required" if choice.required else None,
        tool_names=choice.names,
        single_call=choice.single,
    )


def log_forced(forced: Mapping[str, Any]) -> None:
    """Log each parameter without effect once in a process."""
    for name, value in forced.items():
        if name not in _logged:
            _logged.add(name)
            decides = f"the recipe's sampling.{name}" if name in _IN_RECIPES else "the recipe or the template"
            _log.warning(
                "an agent's request sets %s=%.80r, which has no effect here: %s decides (docs/agents.md). Later requests are "
                "counted in the metric metrics/agent/forced",
                name,
                value,
                decides,
            )


def bare_id(id: str) -> str:
    """The id of an answer without the prefix of its API: that of `resp_0a1b` is `0a1b`."""
    return re.split("[-_]", id)[-1]


def _refuse_beginning(request: ChatRequest) -> None:
    """Raises Refused for a beginning of an answer that the model cannot continue."""
    last, why = request.messages[-1], ""
    if last["role"] != "assistant":
        return
    if not request.conversation:
        why = "is the only one: give the model something to answer"
    elif last.get("tool_calls"):
        why = "has a tool call, which is complete: send its result, or leave it out"
    elif not isinstance(last["content"], str) or not last["content"]:
        why = "has no text: leave it out"
    if why:
        raise Refused(
            400, f"the last message is the model's, so its answer continues it, and it {why}", parameter="messages"
        )


# the requests of one agent

_MOST_WAITING = 64  # requests that wait for those in front of them
_LONGEST_KEY, _MOST_REPORTS = 200, 10_000  # of rewards
_MOST_COUNTING = 8
"""Requests whose tokens are counted at the same time."""


@dataclass(eq=False, slots=True)
class AgentRequest:
    """A request that waits for its answer."""

    request: ChatRequest
    messages: Sequence[Message]
    """The complete conversation in the form that chat templates take."""
    answer: asyncio.Future[AgentAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def abandoned(self) -> bool:
        """Whether the client has closed its connection."""
        return self.answer.cancelled()


class ReportedRewards:
    """The rewards of one conversation that were reported, and those that no turn has received yet."""

    def __init__(self) -> None:
        self.any = False
        """Whether a reward was reported."""
        self._waiting: dict[int | None, float] = {}
        """Rewards that no turn has received yet, by the index of the turn; None: before all answers."""
        self._reports: dict[str, tuple[object, ...]] = {}
        """The reports with a key, by this key."""
        self._final = asyncio.Event()
        """Set with the last reward."""
        self._closed = False
        """Whether the last turn has received its rewards."""

    def has(self, key: object, report: tuple[object, ...]) -> bool:
        """Whether a report with this key was taken before. Raises Refused if that was another report, or the key is no text."""
        if key is not None and not (isinstance(key, str) and 0 < len(key) <= _LONGEST_KEY):
            raise Refused(
                400, f"`key` must be a text of 1 to {_LONGEST_KEY} characters; it is {key!r:.80}", parameter="key"
            )
        known = self._reports.get(key) if isinstance(key, str) else None
        if known is not None and known != report:
            raise Refused(409, f"another reward was reported with the key {key!r}: give each its own", parameter="key")
        if key is not None and known is None and len(self._reports) >= _MOST_REPORTS:
            raise Refused(429, f"{_MOST_REPORTS} rewards with keys were reported in this conversation")
        return known is not None

    def keep(self, key: object, report: tuple[object, ...]) -> None:
        """Keep a report that was taken, so that it counts once."""
        if isinstance(key, str):
            self._reports[key] = report

    def add(self, turn: int | None, reward: object, final: object) -> None:
        """Take a reward of the turn with this index; None: there was no answer yet. Raises Refused."""
        if self._final.is_set():
            raise Refused(410, "a reward with `final` was the last one of this conversation")
        if self._closed:
            raise Refused(
                410, "the conversation has ended: rewards count until seconds_for_rewards after the end of the agent"
            )
        if not isinstance(final, bool):
            raise Refused(400, f"`final` must be true or false; it is {final!r:.80}", parameter="final")
        value = math.nan
        if isinstance(reward, int | float) and not isinstance(reward, bool):
            with contextlib.suppress(OverflowError):  # an integer of more than 308 digits
                value = float(reward)
        if not math.isfinite(total := self._waiting.get(turn, 0.0) + value):
            raise Refused(
                400,
                f"`reward` must be a finite number, also together with the rewards before it; it is {reward!r:.80}",
                parameter="reward",
            )
        self._waiting[turn] = total
        self.any = True
        if final:
            self._final.set()

    async def until_final(self, seconds: float) -> None:
        """Wait for the last reward, at most so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._final.wait(), seconds)

    def take(self, last: int, *, at_end: bool = False) -> tuple[float | None, Mapping[int, float]]:
        """The rewards that were reported since the last call: of the turn `last`, the model's last one, or None; and of earlier
        turns, by their index. `at_end`: later ones are refused."""
        waiting, self._waiting = self._waiting, {}
        self._closed = self._closed or at_end
        reward = added([waiting.pop(None, None), waiting.pop(last, None)])
        return reward, {turn: value for turn, value in waiting.items() if turn is not None}


class KeptRequests:
    """Answered requests and their answers. Clients send the complete conversation with each request: equal messages are kept
    once, so that what is kept grows with the conversation, and not with its square."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[ChatRequest, AgentAnswer]] = {}
        self._messages: dict[bytes, Message] = {}
        """Each message once, by the digest of its JSON."""
        self._last: ChatRequest | None = None

    def __contains__(self, id: str) -> bool:
        return id in self._by_id

    def __getitem__(self, id: str) -> tuple[ChatRequest, AgentAnswer]:
        return self._by_id[id]

    def __iter__(self) -> Iterator[tuple[ChatRequest, AgentAnswer]]:
        return iter(self._by_id.values())

    def add(self, request: ChatRequest, answer: AgentAnswer) -> None:
        """Keep a request, without a prompt of the client's own, which nothing continues by its id."""
        last = self._last
        tools = last.tools if last is not None and last.tools == request.tools else request.tools
        echo = last.echo if last is not None and last.echo == request.echo else request.echo
        messages = self._once(request.messages, () if last is None else last.messages)
        self._last = kept = replace(request, messages=messages, tools=tools, echo=echo, prompt=None)
        self._by_id[answer.id] = kept, answer

    def _once(self, messages: Sequence[Message], before: Sequence[Message]) -> list[Message]:
        """The messages, each as it was kept first. Most begin as those of the request before, which is quick to see."""
        same = 0
        while same < min(len(messages), len(before)) and messages[same] == before[same]:
            same += 1
        return [*before[:same], *(self._messages.setdefault(_digest(one), one) for one in messages[same:])]


def _digest(message: Message) -> bytes:
    return hashlib.blake2b(json.dumps(message, sort_keys=True, default=repr).encode(), digest_size=16).digest()


class AgentConversation:
    """The requests, the rewards and the key of one conversation."""

    def __init__(
        self,
        row: str,
        *,
        check_size: Callable[[ChatRequest], None],
        count: Callable[[ChatRequest], Awaitable[int]],
    ) -> None:
        self.key = f"tw-{secrets.token_urlsafe(24)}"
        """The API key of the agent. It identifies the conversation."""
        self.row = row
        """The row as JSON."""
        self._check_size = check_size
        """Refuses a request that is too long for any prompt. Raises Refused."""
        self._count = count
        """The number of tokens of a request's prompt. Raises Refused."""
        self._counting = 0
        """Requests for such a number that are not answered yet."""
        self.loop = asyncio.get_running_loop()
        self._waiting: collections.deque[AgentRequest] = collections.deque()
        self._current: AgentRequest | None = None
        """The request that the model is answering."""
        self._arrived = asyncio.Event()
        self._end: str | None = None
        """Why there are no further answers; None while the conversation goes on."""
        self._answered = KeptRequests()
        """The requests, with the messages that they continue, and their answers."""
        self._turns: dict[str, int] = {}
        """The index of the turn of each answer, by the id of the answer."""
        self.last_answered: int | None = None
        """The index of the turn of the last answer; None before the first."""
        self.rewards = ReportedRewards()

    async def ask(self, request: ChatRequest, *, finish: bool = False) -> AgentAnswer:
        """Wait for the answer to a request. If the caller is cancelled, the request is abandoned, which fails the conversation if
        the model is answering it; with `finish`, that answer becomes a turn that the caller does not receive. Raises Refused."""
        self._refuse_after_end()
        request = self._complete(request)
        self._check_size(request)
        if request.prompt is None:
            _refuse_beginning(request)
        if len(self._waiting) >= _MOST_WAITING:
            raise Refused(429, f"{_MOST_WAITING} requests of this conversation are waiting already")
        pending = AgentRequest(request, template_messages(request.conversation))
        self._waiting.append(pending)
        self._arrived.set()
        if not finish:
            return await pending.answer
        try:
            return await asyncio.shield(pending.answer)
        except asyncio.CancelledError:
            if pending in self._waiting:
                pending.answer.cancel()
            raise

    async def next_request(self) -> AgentRequest:
        """Wait for the next request. Requests that were abandoned while they waited are left out."""
        while True:
            while self._waiting:
                pending = self._waiting.popleft()
                if not pending.abandoned:
                    self._current = pending
                    return pending
            self._arrived.clear()
            await self._arrived.wait()

    async def count_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of the prompt of a request, which is not answered. Raises Refused."""
        self._refuse_after_end()
        request = self._complete(request)
        self._check_size(request)
        if self._counting >= _MOST_COUNTING:
            raise Refused(
                429, f"the tokens of {_MOST_COUNTING} requests of this conversation are being counted already"
            )
        self._counting += 1
        try:
            return await self._count(request)
        finally:
            self._counting -= 1

    def answer(self, pending: AgentRequest, answer: AgentAnswer, turn: int) -> None:
        """Answer a request with the turn of this index."""
        self._current = None
        self._answered.add(pending.request, answer)
        self._turns[answer.id] = self.last_answered = turn
        pending.answer.set_result(answer)

    def answered(self, id: str, parameter: str | None = None) -> tuple[ChatRequest, AgentAnswer]:
        """The request and the answer with this id. Raises Refused if there is none."""
        if id not in self._answered:
            raise Refused(404, f"there is no answer with the id {id!r:.80}", parameter=parameter)
        return self._answered[id]

    def _complete(self, request: ChatRequest) -> ChatRequest:
        """A request with the messages that it continues. Raises Refused if there is no such answer."""
        messages = request.messages
        if request.previous_response is not None:
            before, answer = self.answered(request.previous_response, "previous_response_id")
            messages = [*before.messages, answer.message, *messages]
        return replace(request, messages=self._joined(messages))

    def _joined(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with the beginning of an answer that the client gave, and the answer, as one message of the model.

        Clients send both back as two messages, or as one.
        """
        begun = {(request.prefill, answer.text) for request, answer in self._answered if request.prefill}
        joined: list[Message] = []
        for message in messages:
            before = joined[-1] if joined else message
            if before["role"] == message["role"] == "assistant" and (before["content"], message["content"]) in begun:
                joined[-1] = {**message, "content": f"{before['content']}{message['content']}"}
            else:
                joined.append(message)
        return joined

    async def report_reward(self, reward: object, id: object = None, final: object = False, key: object = None) -> None:
        """Take a reward of the answer with this id, or of the last one that the agent has received; also after the last answer.
        `final`: there are no more. A second report with the same `key` is the first one, which the client has sent again.

        Raises Refused if it is not a finite number, comes after the last one, or has the key of another reward.
        """
        if self.rewards.has(key, (reward, id, final)):
            return
        turn = self.last_answered if id is None else self._turns.get(bare_id(str(id)))
        if turn is None and id is not None:
            raise Refused(404, f"there is no answer with the id {id!r:.80} in this conversation", parameter="id")
        self.rewards.add(turn, reward, final)
        self.rewards.keep(key, (reward, id, final))

    def refuse(self, pending: AgentRequest, refused: Refused) -> None:
        """Answer a request with an error. The agent may send another one."""
        self._current = None
        if not pending.answer.done():
            pending.answer.set_exception(refused)
            pending.answer.exception()  # the client may be gone: the exception counts as seen

    def end(self, reason: str) -> None:
        """Answer no further requests. Requests that are waiting are refused with this reason."""
        self._end = self._end or reason
        waiting = [*self._waiting, *([self._current] if self._current is not None else [])]
        self._waiting.clear()
        self._current = None
        for pending in waiting:
            if not pending.answer.done():
                pending.answer.set_exception(Refused(410, self._end))
                pending.answer.exception()  # the client may be gone: the exception counts as seen

    def _refuse_after_end(self) -> None:
        if self._end is not None:
            raise Refused(410, self._end)
