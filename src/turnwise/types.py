"""Every noun that crosses a folder: messages, turns, segments, trajectories, groups, requests, completions, sampling,
and the reasons for which a conversation ends.

The nouns know nothing of the code that makes or reads them: this module imports no other module of the package.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

# how a conversation ends


class MismatchKind(StrEnum):
    """The place of a difference between the tokens and the chat template's rendering."""

    CONTEXT = "context"
    """Tokens that the model did not sample."""
    COMPLETION = "completion"
    """Sampled tokens. They are trained on as they were sampled."""
    TEMPLATE_ERROR = "template_error"
    """The template accepted the messages turn by turn, and raises an error for all of them together."""


class Stop(StrEnum):
    """Why a conversation ended. The values are the names in the record and in the metrics (`stop/<value>`)."""

    DONE = "done"
    """The environment ended the conversation."""
    MAX_TURNS = "max_turns"
    """The model has taken `limits.turns` turns."""
    LENGTH = "length"
    """The last turn reached `limits.tokens_per_turn`, or `SamplingChange.max_tokens`, before its stop token."""
    MAX_TOKENS = "max_tokens"
    """`limits.tokens` tokens were sampled in the trajectory."""
    MAX_RESPONSE = "max_response"
    """The tokens after the first prompt reached `limits.response_tokens`, or the next prompt would reach it."""
    CONTEXT = "context"
    """The next prompt leaves no room for a turn within `limits.context`, or the last turn was cut by it."""
    DEADLINE = "deadline"
    """A turn or the trajectory took longer than `limits.seconds_per_turn` or `limits.seconds`."""
    ERROR = "error"
    """Something failed; `Trajectory.error` says what."""

    @property
    def failed(self) -> bool:
        """Whether the conversation failed. A failed trajectory is recorded, but neither scored nor trained on."""
        return self in (Stop.ERROR, Stop.DEADLINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a conversation failed."""

    kind: str
    """What failed: `row`, `environment`, `engine`, `tokens`, `reward`, `teacher`, `loss_mask` or `deadline`; `agent` (an agent of
    the episode) or `episode` (the environment that opened the agent); `internal` is a bug in turnwise."""
    message: str
    """The value, the rule and the fix."""
    traceback: str = field(default="", compare=False)
    """The frames of the exception without those of turnwise, innermost last. Empty if no exception was raised."""


@dataclass(frozen=True, slots=True)
class TemplateMismatch:
    """A difference between the tokens of a segment and the tokens that the chat template writes for its messages."""

    kind: MismatchKind | None
    """None if it is not known, because an earlier version wrote the record."""
    message: str
    """The place, both texts and both lists of token ids."""

    def __str__(self) -> str:
        return self.message


# sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `temperature=0` is greedy decoding; `top_k=0`, `top_p=1` and `min_p=0` disable a filter.

    The order is temperature, top-k, top-p, min-p. Each filter applies to the tokens that the previous filter has kept.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Texts that end the turn. The token that completes a stop text is kept, with all of its text."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the turn. The stop token is kept."""

    @property
    def filtered(self) -> bool:
        """Whether a filter excludes tokens from the sampled distribution."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def exact_kinds(self) -> frozenset[LogprobKind]:
        """The kinds of log-probability that equal those of the sampled distribution under these options."""
        kinds = {LogprobKind.SAMPLED}
        if not self.filtered:
            kinds.add(LogprobKind.TEMPERED)
            if self.temperature == 1.0:
                kinds.add(LogprobKind.RAW)
        return frozenset(kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The form that the text of a turn must have, after reasoning and unless the turn calls tools."""

    kind: Literal["json_object", "json_schema", "regex"]
    value: str = ""
    """The JSON schema as JSON text, or the regular expression; empty for `json_object`."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> AnswerFormat | None:
        """The form in the shape of OpenAI's `response_format`; None for `{type: text}`. Raises ValueError."""
        kind, rest = given.get("type"), {name: value for name, value in given.items() if name != "type"}
        if kind in ("text", "json_object") and not rest:
            return cls(kind="json_object") if kind == "json_object" else None
        if kind == "regex" and set(rest) == {"pattern"} and isinstance(rest["pattern"], str):
            return cls(kind="regex", value=rest["pattern"])
        if kind == "json_schema":
            # the Responses API and Anthropic have no inner object
            inner = rest.get("json_schema", rest)
            if isinstance(inner, Mapping) and isinstance(inner.get("schema"), dict):
                return cls(kind="json_schema", value=json.dumps(inner["schema"]))
        raise ValueError(
            f"{dict(given)!r:.200} is no form of an answer: write {{type: json_schema, json_schema: {{schema: {{...}}}}}}, "
            f"{{type: json_object}} or {{type: regex, pattern: ...}}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What a turn may consist of. Tokens that would leave the grammar are removed from the distribution that is sampled from.

    The grammar, the text before the first token and the tokens give the mask of each token, in the engine as in the trainer.
    """

    grammar: str
    """A grammar in the Lark dialect of llguidance, of the complete text of the turn."""
    stops: tuple[int, ...]
    """Token ids that end the turn: they can be sampled where the grammar may end."""
    before: str = ""
    """The text of the turn before its first sampled token: a prefill, or what was kept of a turn that is resumed."""
    start: int = 0
    """The place of the first sampled token in the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingChange:
    """A change of the sampling by an environment. It applies from the next turn until the next change.

    None stands for the recipe's value, so `SamplingChange()` ends all changes. Temperature and filters cannot change within a
    run: the trainer computes the log-probabilities of all tokens with the recipe's values.
    """

    max_tokens: int | None = None
    """Sampled tokens of one turn, at least 1. `limits.tokens_per_turn` still applies. A cut turn ends the conversation."""
    answers_cut: bool = False
    """Whether the environment answers a turn that `max_tokens`, which must be given, cut, so that the conversation goes on. A
    turn that a limit of the recipe cut always ends the conversation."""
    stop: Sequence[str] | None = None
    """Texts that end a turn, instead of `sampling.stop`."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a turn, besides those of the recipe and of the model."""
    answer_format: AnswerFormat | None = None
    """The form of the turn's text, instead of `sampling.response_format`."""
    tool_choice: Literal["auto", "required"] | None = None
    """Whether a turn must call a tool, instead of `tool_calls.choice`."""
    tool_names: Sequence[str] | None = None
    """The tools that a turn may call, of those that are offered; None: all of them. The prompt does not change."""
    single_call: bool = False
    """Whether a turn ends behind its first tool call."""

    @property
    def asks_for_form(self) -> bool:
        """Whether turns must have a form, which takes a grammar."""
        of_calls = self.tool_choice == "required" or self.tool_names is not None or self.single_call
        return self.answer_format is not None or of_calls


class LogprobKind(StrEnum):
    """The distribution of a reported log-probability. Engines differ: vLLM reports `raw` by default, SGLang `tempered`."""

    SAMPLED = "sampled"
    """The sampled distribution: after temperature and filters, renormalized."""
    TEMPERED = "tempered"
    """After temperature, before the filters."""
    RAW = "raw"
    """`log_softmax(logits)`: before temperature and filters."""
    NONE = "none"
    """Nothing was sampled (scripted texts), or kinds are mixed. The numbers must not be used."""


# tokens

NOT_SAMPLED = -1
"""The value of the columns `turn` and `version` for tokens that the model did not sample."""


@dataclass(slots=True, kw_only=True)
class Media:
    """An image or a video in a token sequence."""

    kind: Literal["image", "video"]
    start: int
    """Position of the first placeholder token in the sequence (a segment, a prompt, or new messages that will be appended)."""
    length: int
    """Tokens from the first to the last placeholder, both included. There may be others between them, such as timestamps."""
    source: Any
    """The input: a PIL image, or the frames of a video."""
    inputs: Mapping[str, Any]
    """The processor's output, by the model's argument names: `pixel_values` [patches, features], `image_grid_thw` [1, 3]."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts that computed the first tokens of a sequence, in each layer of a mixture of experts: numbers from 0.

    Example: two tokens, one layer, two experts for each token: `Routes(1, 2, 1, bytes([5, 0, 3, 5]))`. The first token went
    through the experts 5 and 0, the second through 3 and 5.
    """

    layers: int
    """Layers with experts."""
    top_k: int
    """Experts of a token in a layer."""
    number_bytes: int
    """Bytes of the number of an expert, the lowest byte first: 1 or 2."""
    data: bytes
    """The numbers, by token, then by layer, in the order in which the router gave them."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.top_k * self.number_bytes

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.data) // self.token_bytes

    def first(self, tokens: int) -> Routes:
        """Those of the first `tokens` tokens, or of all."""
        return self if tokens >= len(self) else replace(self, data=self.data[: tokens * self.token_bytes])

    def continued(self, longer: Routes) -> Routes:
        """These, and those of `longer` for the tokens after them."""
        return replace(self, data=self.data + longer.data[len(self.data) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt that an engine continues."""

    conversation: str
    """The trajectory's id. The engine may keep the KV cache of this conversation until `Engine.release`."""
    token_ids: Sequence[int]
    """The complete prompt, from the first token."""
    media: Sequence[Media] = ()
    """The images and videos in the prompt, in order."""
    sampling: Sampling
    seed: int = 0
    """Seed of this request's own random stream. The same seed draws the same numbers, whatever else is in the batch."""
    constraint: Constraint | None = None
    """What may be sampled; None: every token."""
    routes: Routes | None = None
    """The experts that have computed the first tokens of the prompt. An engine that records experts uses them again where it
    computes these tokens again."""
    policy: str = ""
    """The policy that samples, where several are on one server; empty: the recipe's model. An engine sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for a request. All columns have the length of `token_ids`.

    Example: a turn of two tokens, the second one the stop token::

        Completion(token_ids=[17, 2], logprobs=[-0.4, -0.01], versions=[3, 3], finish_reason="stop", logprob_kind="sampled")
    """

    token_ids: Sequence[int]
    """The sampled tokens, including the stop token if one was sampled."""
    logprobs: Sequence[float]
    """Natural logarithms of the probabilities; `logprob_kind` says of which distribution."""
    versions: Sequence[int]
    """The version of the weights that sampled each token."""
    finish_reason: Literal["stop", "length"]
    """`length` if `Sampling.max_tokens` cut the completion."""
    logprob_kind: LogprobKind
    raw_logprobs: Sequence[float] | None = None
    """`log_softmax(logits)` of the same tokens; None if the engine does not report it."""
    prompt_tokens: int | None = None
    """The number of tokens of the prompt, where `cached_tokens` is known; else it may be None."""
    cached_tokens: int | None = None
    """Prompt tokens whose keys and values the engine took from its prefix cache; None if the engine does not report it."""
    routes: Routes | None = None
    """The experts of the tokens of the prompt and of the completion, from the first token on. The last sampled token has none: it
    has not been an input of the model yet. None if the engine does not record them."""

    def frozen(self) -> Completion:
        """The completion with tuples as columns: user code that holds it cannot change them."""
        raw = self.raw_logprobs
        return replace(
            self,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            raw_logprobs=None if raw is None else tuple(raw),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The counts of tokens that a server reports for a turn, where the tokens themselves are not known."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Prompt tokens that the server took from a cache; None if it does not report them."""


@dataclass(slots=True)
class Segment:
    """An unbroken token sequence: one training row. Four columns of equal length, to which tokens are appended.

    Columns are edited in two cases only: an environment cuts the end of the last turn (`Reply.resume`, `truncate`), or it
    excludes sampled tokens from training (`Reply.masked`, `mask_tokens`).

    Example: prompt P0 (2 tokens), answer A0 (2), the environment's message E0 (1), answer A1 (1)::

        token_ids = P0 P0 A0 A0 E0 A1
        turn      = -1 -1  0  0 -1  1
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probability of the token when it was sampled; 0 for tokens that the model did not sample."""
    turn: array[int] = field(default_factory=lambda: array("i"))
    """Index of the turn that sampled the token, or -1. Trained on are the tokens with `turn >= 0` of turns with a
    `Turn.weight` above 0."""
    version: array[int] = field(default_factory=lambda: array("i"))
    """Version of the weights that sampled the token, or -1."""
    media: list[Media] = field(default_factory=list)
    """The images and videos among the tokens, in order."""
    trainer_logprobs: array[float] = field(default_factory=lambda: array("f"))
    """Log-probability of each token under the trainer's weights, in the first forward pass that trained on it: 0 for tokens that
    the model did not sample, NaN for sampled tokens that were in no forward pass. Empty until the segment is trained on."""
    routes: Routes | None = None
    """The experts of the first tokens, if the engine records them: of all tokens but those that no pass has computed yet."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_context(self, token_ids: Sequence[int], media: Sequence[Media] = ()) -> None:
        """Append tokens that the model did not sample. `Media.start` counts from the first of these tokens."""
        count = len(token_ids)
        self.media.extend(replace(item, start=item.start + len(self)) for item in media)
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * count)
        self.turn.extend([NOT_SAMPLED] * count)
        self.version.extend([NOT_SAMPLED] * count)

    def append_completion(self, turn: int, completion: Completion) -> None:
        """Append the tokens that the model sampled in turn `turn`.

        Raises ValueError if the completion's columns differ in length.
        """
        count = len(completion.token_ids)
        if len(completion.logprobs) != count or len(completion.versions) != count:
            raise ValueError(
                f"the engine returned {count} token ids, {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} versions; all three must have the same length"
            )
        routes = completion.routes
        if routes is not None and len(routes) >= len(self) + count:
            raise ValueError(
                f"the engine returned the experts of {len(routes)} tokens; there are {len(self) + count} tokens, and the last "
                f"one has not been computed"
            )
        # convert all columns before one is extended: a bad value must not leave the columns at different lengths
        ids, logprobs = array("i", completion.token_ids), array("f", completion.logprobs)
        versions = array("i", completion.versions)
        self.token_ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.turn.extend([turn] * count)
        self.version.extend(versions)
        if routes is not None:  # what was recorded first stays: the sampled tokens were computed so
            self.routes = routes if self.routes is None else self.routes.continued(routes)

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first `length`. Raises ValueError if the model did not sample all of them."""
        if any(turn < 0 for turn in self.turn[length:]):
            raise ValueError(
                f"cannot remove all tokens after token {length}: some are context, and only sampled tokens at the end of a turn "
                f"can be removed"
            )
        for column in (self.token_ids, self.logprobs, self.turn, self.version):
            del column[length:]
        if self.routes is not None:
            self.routes = self.routes.first(length)

    def mask_tokens(self, turn: int, positions: Collection[int]) -> None:
        """Turn sampled tokens of turn `turn` into context, by their positions among its sampled tokens.

        Positions of tokens that `truncate` has removed are ignored.
        """
        sampled = [index for index, sampled_in in enumerate(self.turn) if sampled_in == turn]
        for position in positions:
            if position < len(sampled):
                index = sampled[position]
                self.logprobs[index] = 0.0
                self.turn[index] = self.version[index] = NOT_SAMPLED


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """The number of tokens, or characters, that two sequences have in common at their beginnings."""
    shorter = min(len(first), len(second))
    if list(first[:shorter]) == list(second[:shorter]):  # the usual case, without a loop in Python
        return shorter
    return next(n for n in range(shorter) if first[n] != second[n])


# conversations

Message = dict[str, Any]
"""One chat message in the OpenAI format: `{"role": ..., "content": ...}`, with `tool_calls` or `tool_call_id` where the
role needs it.

`content` is a text, or a list of parts: `{"type": "text", "text": ...}`, and the same with `image` or `video`.
"""

ToolSchema = dict[str, Any]
"""One tool in the OpenAI format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the data set: the start of a conversation. `row["answer"]` is the column `answer`, and `"answer" in row` says
    whether there is one."""

    id: str
    """Unique in the data set: the row's number, unless `data.columns.id` names a column."""
    messages: Sequence[Message]
    """The opening messages, at least one."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other columns, by their names after `data.columns` was applied."""
    source: str = ""
    """The data set that the row is from, if `data.train` or `data.eval` is a list of several; else its kind, if
    `data.columns.source` names a column; else empty. Metrics and evaluations have numbers for each."""
    seed_step: int = 0
    """For rows that an environment generates from their column `seed`: what each further pass over the rows adds to that seed, so
    that no conversation is repeated. 0: all passes have the same rows."""

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """The row's own arguments of the chat template (its column `chat_template_kwargs`): `{"enable_thinking": False}`."""
        return self.fields.get("chat_template_kwargs") or {}

    def in_pass(self, number: int) -> Row:
        """The row in a pass over the rows, counted from 0: with another seed if it has a `seed_step`, else this row."""
        if not number or not self.seed_step:
            return self
        seed = self["seed"] + number * self.seed_step
        return replace(self, id=f"{self.id}+{number}", fields={**self.fields, "seed": seed})

    if not TYPE_CHECKING:  # a checker of types knows the attributes

        def __getattr__(self, name: str) -> Any:
            """Called for names that are no attributes: says where the prompt and the columns are. Raises AttributeError."""
            if name.startswith("_") or name == "fields":  # copy and pickle ask for these, before there are fields
                raise AttributeError(name)
            if name in ("prompt", "question", "text"):
                where = "the messages of the prompt are row.messages"
            else:
                where = f"the column {name!r} is row[{name!r}]" if name in self.fields else "columns are row['<name>']"
            raise AttributeError(f"a row has no attribute {name!r}: {where}")

    def get(self, name: str, default: Any = None) -> Any:
        """The column `name`, or `default` if the row has none."""
        return self.fields.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def __iter__(self) -> Iterator[str]:
        """The names of the columns."""
        return iter(self.fields)

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            have = ", ".join(sorted(self.fields)) or "none"
            if name in ("prompt", "messages"):
                raise KeyError(
                    f"row {self.id!r}: the messages of the prompt are row.messages, a list of {{'role': ..., 'content': ...}}; "
                    f"row[...] is for the other columns: {have}"
                ) from None
            if name == "id":
                raise KeyError(f"row {self.id!r}: its id is row.id; row[...] is for the columns: {have}") from None
            raise KeyError(
                f"row {self.id!r} has no column {name!r}; its columns are: {have}. Add the column to the data, or map another "
                f"column to it: data.columns.{name}=<column>"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call as the model wrote it. A call that could not be parsed has `error`, and the model receives that error."""

    id: str
    """Unique within a turn: `written_id` if that can be used, else `call_<n>`, counted over the conversation."""
    name: str
    arguments: Mapping[str, Any]
    text: str
    """The call's text as it was sampled."""
    written_id: str = ""
    """The id that the model wrote, such as Kimi's `functions.lookup:0`; empty if the format of the calls has no ids."""
    error: str | None = None
    """Why the call could not be parsed, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """A tool call and its result."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    content: str
    """The text that the model received."""
    error: str | None = None
    """The kind of error, or None: `malformed`, `unknown_tool`, `arguments`, `parallel`, `raised`, `timeout`."""
    reward: float = 0.0
    """The tool's reward for the call, which is part of the turn's reward."""
    seconds: float = 0.0
    attempts: int = 1
    """How often the tool was called, retries included."""
    traceback: str = field(default="", compare=False)
    """The frames of the tool's exception, or empty. The model does not receive them."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn of the model: its text, its tool calls and its reward."""

    index: int
    """The first turn of a conversation has index 0."""
    message: Message
    """The parsed assistant message: `content`, and `tool_calls` and `reasoning_content` if there are any."""
    text: str
    """The sampled text without the stop token, unparsed."""
    message_index: int | None = None
    """Index of `message` in the history in which the turn was sampled, so that `history[:message_index]` are the messages
    that the model answered. None in trajectories that were read from records of schema 1."""
    history: int = 0
    """Which history that is: an index into `Trajectory.previous_histories`, or its length for `Trajectory.messages`."""
    reasoning_opening: str = ""
    """The end of the generation prompt, directly before `text`, if it opens the reasoning: `"<think>\\n"`. Otherwise empty."""
    reasoning: str = ""
    """The part of the text between the model's reasoning marks; empty if there is none."""
    weight: float = 1.0
    """Weight of the turn's tokens in the loss; 0 excludes the turn. Set by `loss_mask`."""
    train_on: bool = False
    """Whether the environment has asked to train on the turn (`Reply.train_on`)."""
    kept_tokens: int | None = None
    """How many of the sampled tokens were kept, if the environment let the model resume this turn (`Reply.resume`); else None."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls in the turn, including those that could not be parsed."""
    outcomes: tuple[ToolOutcome, ...] = ()
    """The results of the calls that the environment has answered."""
    tools: Sequence[ToolSchema] = ()
    """The tools that the model was offered when it sampled this turn."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """The further arguments of the chat template for this turn's prompt: those of the recipe, of the row and of the environment,
    which may be an agent's request."""
    reward: float = 0.0
    """The sum of `rewards`. Written by `add_reward` only."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The parts of `reward` by source: `environment`, `final_reward`, or the name of a reward function. Empty if no source gave a
    number, which may be 0. Earlier versions did not record parts that are 0."""
    info: dict[str, Any] = field(default_factory=dict)
    """Data that the environment keeps with the turn. It should be JSON-serialisable."""
    constraint: Constraint | None = None
    """What the turn could consist of; None: its tokens were sampled without a grammar."""
    finish_reason: str = "stop"
    """`length` if a limit cut the turn."""
    observed: bool = False
    """Whether the environment answered with an observation (`Reply.observation`)."""
    prompt_tokens: int = 0
    """Tokens of the prompt that the turn was sampled after. Not part of the record."""
    completion: Completion | None = None
    """The engine's result. Not part of the record."""
    usage: Usage | None = None
    """The counts of tokens that an endpoint reported; None with an engine that samples tokens (the segments have them)."""
    started: float | None = None
    """When the prompt of the turn was encoded and sent to the engine, in Unix seconds; None where unknown."""
    seconds_engine: float = 0.0
    seconds_environment: float = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        # a copy, and the constructor, set attributes that are not set yet; whatever else sets a reward is not in `rewards`
        if name in ("reward", "rewards") and hasattr(self, name):
            raise AttributeError(
                f"turn.{name} cannot be set, because the reward of the conversation would not contain it. For the reward of one "
                f"turn, return a number from a function in reward.turns or Reply(reward=...) from an environment, or call "
                f"turn.add_reward(number, source). To divide the reward of the conversation among its turns, set credit.name: "
                f"shared gives it to each turn, discounted multiplies it by credit.gamma for each later turn (docs/credit.md)"
            )
        object.__setattr__(self, name, value)

    def add_reward(self, value: float, source: str) -> None:
        """Add a part to the turn's reward. No other code writes the reward of a turn."""
        object.__setattr__(self, "reward", self.reward + value)
        self.rewards[source] = self.rewards.get(source, 0.0) + value

    @property
    def ended(self) -> float | None:
        """When the environment had answered the turn, in Unix seconds; None where unknown."""
        return None if self.started is None else self.started + self.seconds_engine + self.seconds_environment


@dataclass(frozen=True, slots=True)
class EnvironmentHandle:
    """The object behind an environment. It outlives its conversation until the reward functions have run."""

    instance: Any
    release: Callable[[], None]
    """Called once when the reward functions have run."""


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The record of one conversation. Reward and advantages belong to the trajectory and its turns, never to a segment."""

    id: str
    group: str
    """`Group.id`."""
    row: Row
    step: int | None = None
    """The training step, counted from 1; None where there are no steps. Set when the trajectory is written."""
    agent: str = ""
    """The name of the agent that took the turns, if the environment opened it beside the conversation of the row (`agents`);
    empty for the conversation of the row."""
    policy: str = ""
    """The name of the policy that took the turns of an agent (`policies` of the recipe): a frozen one, or another trained one
    (`trained`). Empty: the trained model of the section `model`."""
    episode: str = ""
    """Of an agent's conversation: the id of the trajectory whose environment opened it. Else empty."""
    agents: list[Trajectory] = field(default_factory=list)
    """The conversations of the agents that the environment opened (`turnwise.current_episode`), in the order of their first
    turns: together with this conversation, they are the episode."""
    trained: bool = True
    """Whether the trajectory is trained on, if it has a reward: not for an agent that was opened with `train=False`, or that a
    frozen policy plays."""
    shares_reward: bool = False
    """Whether an agent's conversation also gets the reward of the conversation whose environment opened it."""
    seed: int = 0
    """Seed of the conversation's own random stream."""
    messages: list[Message] = field(default_factory=list)
    """The conversation as messages, all roles."""
    previous_histories: list[list[Message]] = field(default_factory=list)
    """Copies of `messages` from before each time that the environment replaced the history (`Reply.rewrite`), oldest first."""
    tools: Sequence[ToolSchema] = ()
    """The tools that the model is offered now; `Turn.tools` are those of a turn."""
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    """The tokens. Usually there is one segment; a replaced history, other tools or removed reasoning begin a new one."""
    stop: Stop | None = None
    """Why the conversation ended; None while it runs."""
    error: Failure | None = None
    """Why the conversation failed; None if it did not."""
    reward: float | None = None
    """The sum of `rewards`; None until the trajectory is scored, and if it failed."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The parts of `reward` by the name of the reward function. `turns` is the sum of the environment's rewards for the turns."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers that reward functions and environments report. They are not part of `reward`."""
    advantages: list[float | Sequence[float]] = field(default_factory=list)
    """One entry for each turn; empty where the trajectory is not trained on. An entry is one number for all tokens of the turn,
    or one number for each of its sampled tokens: those whose `Segment.turn` is the turn's index, in the order of the segments."""
    values: list[float | Sequence[float]] = field(default_factory=list)
    """The critic's estimates, set before advantages are computed; empty without a critic. The shape is that of `advantages`: a
    number is the value of the state before the turn; with a number for each sampled token, each is the value before the token."""
    returns: list[float | Sequence[float]] = field(default_factory=list)
    """The critic's targets, in the shape of `advantages`. Empty without a critic, and where the trajectory is not trained on."""
    penalties: list[Sequence[float]] = field(default_factory=list)
    """What `reward.kl` subtracts from the reward: for each turn, a number for each of its sampled tokens. Empty without
    `reward.kl`. `reward` does not contain it; estimators of advantages subtract it."""
    teacher_scores: list[Sequence[Sequence[float]]] = field(default_factory=list)
    """What the teacher says of the sampled tokens: for each turn, a row for each of its sampled tokens, with the token's
    log-probability, the ids of the K most likely tokens, and their log-probabilities. Empty without scores of a teacher."""
    teacher_shares: tuple[float, ...] = ()
    """The share of each local teacher in what is learnt from the trajectory, where their distributions are compared in the
    update."""
    logprob_kind: LogprobKind = LogprobKind.NONE
    template_mismatch: TemplateMismatch | None = None
    """The first difference between the tokens and what the chat template writes for the messages; None if they agree."""
    escaped: Counter[str] = field(default_factory=Counter)
    """Control tokens that stood as text in messages of others and were kept text, with their numbers
    (`data.escape_control_tokens`)."""
    started: float | None = None
    """When the conversation began, in Unix seconds; None where unknown."""
    seconds: float = 0.0
    """How long the conversation took."""
    environment: EnvironmentHandle | None = None
    """For reward functions that read the environment's object. None once the trajectory is scored. Not part of the record."""

    def __getitem__(self, key: str) -> Any:
        """The trajectory as a dictionary, for functions that were written for one: `trajectory["turns"][-1]["content"]`.

        `turns` are messages here; `trajectory.turns` are the turns of the model (`DICTIONARY_KEYS`). Raises KeyError.
        """
        if (of := DICTIONARY_KEYS.get(key)) is None:
            raise KeyError(
                f"trajectory[{key!r}]: as a dictionary, a trajectory has the keys {', '.join(DICTIONARY_KEYS)}; its other data "
                f"are attributes, such as trajectory.stop, and columns are in trajectory.row"
            )
        return of(self)

    def get(self, key: str, default: Any = None) -> Any:
        """`trajectory[key]`, or `default` for another key."""
        return self[key] if key in DICTIONARY_KEYS else default

    def __contains__(self, key: object) -> bool:
        return key in DICTIONARY_KEYS

    def keys(self) -> Collection[str]:
        """The keys of the trajectory as a dictionary: `dict(trajectory)` has them all."""
        return DICTIONARY_KEYS.keys()

    @property
    def failed(self) -> bool:
        """Whether the conversation failed. A failed trajectory is recorded, but not in group statistics and not trained on."""
        return self.error is not None

    @property
    def answer(self) -> str:
        """The content of the model's last message, or an empty text."""
        return str(self.turns[-1].message.get("content") or "") if self.turns else ""

    @property
    def assistant_texts(self) -> list[str]:
        """The sampled text of each turn: no text of tools or users."""
        return [turn.text for turn in self.turns]

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled, including those that were cut or masked. A trajectory that was read from a
        record does not know those, and does not count them. With an endpoint: the number that the endpoint reported."""
        if self.turns and all(turn.completion is None for turn in self.turns):
            reported = sum(turn.usage.completion_tokens for turn in self.turns if turn.usage is not None)
            return reported + sum(turn >= 0 for segment in self.segments for turn in segment.turn)
        return sum(len(turn.completion.token_ids) for turn in self.turns if turn.completion is not None)

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens in the loss: those of turns with a weight above 0. 0 for a trajectory without advantages."""
        if not self.advantages:
            return 0
        return sum(turn >= 0 and self.turns[turn].weight > 0 for segment in self.segments for turn in segment.turn)

    def has_advantage(self, turn: int) -> bool:
        """Whether a token of turn `turn` has an advantage other than zero."""
        advantage = self.advantages[turn]
        return advantage != 0 if isinstance(advantage, float | int) else any(advantage)

    def fail(self, failure: Failure) -> None:
        """Mark the trajectory as failed. Its messages, turns and tokens stay."""
        self.error = failure
        self.stop = Stop.DEADLINE if failure.kind == "deadline" else Stop.ERROR
        self.reward = None
        self.advantages = []
        self.returns = []


def _entries(trajectory: Trajectory) -> list[tuple[Message, Turn | None]]:
    """The messages up to the model's last turn, as a dictionary has them, each with the turn that the model wrote or None.

    The content of the model's turns is the text that the model wrote, with reasoning and tool calls. Messages after the last
    turn are left out, because the model did not read them. Observations have the role `tool`.
    """
    turns = {id(turn.message): turn for turn in trajectory.turns}
    present = len(trajectory.previous_histories)
    places = {turn.message_index: turn for turn in trajectory.turns if turn.history == present}
    entries: list[tuple[Message, Turn | None]] = []
    last, end = None, 0
    for place, message in enumerate(trajectory.messages):
        turn = turns.get(id(message)) or places.get(place)  # by place: in a trajectory that was read from a record
        content = _text(message) if turn is None else turn.text
        observed = turn is None and last is not None and last.observed
        entries.append(({**message, "content": content, **({"role": "tool"} if observed else {})}, turn))
        if turn is not None:
            last, end = turn, len(entries)
    return entries[:end]


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return str(content or "")


DICTIONARY_KEYS: Mapping[str, Callable[[Trajectory], Any]] = {
    "turns": lambda trajectory: [message for message, _ in _entries(trajectory)],
    "reward": lambda trajectory: sum(turn.reward for turn in trajectory.turns),
    "per_turn_rewards": lambda trajectory: [0.0 if turn is None else turn.reward for _, turn in _entries(trajectory)],
    "prompt": lambda trajectory: _text(trajectory.row.messages[-1]) if trajectory.row.messages else "",
    "response": lambda trajectory: trajectory.answer,
    "row": lambda trajectory: dict(trajectory.row.fields),
}
"""The keys of a trajectory as a dictionary: the messages up to the model's last turn (`turns`), the rewards that the environment
and the tools gave (`reward`; `per_turn_rewards`, one for each entry of `turns`), the last message of the row (`prompt`), the
model's last answer (`response`), and the columns of the row (`row`)."""


@dataclass(slots=True, kw_only=True)
class Group:
    """The trajectories of one row. Group-based advantages (GRPO) compare their rewards."""

    id: str
    row: Row
    trajectories: list[Trajectory]
    baseline: Trajectory | None = None
    """A conversation at temperature 0 on the same row, for estimators that compare with its reward (ReMax). It is scored, and not
    trained on. A group of agents has that of the row too, and is compared with the trained agents of the same name and policy in
    it."""

    @property
    def policy(self) -> str:
        """`Trajectory.policy` of the conversations, which is the same for all of a group."""
        return self.trajectories[0].policy if self.trajectories else ""

    def of_agents(self) -> list[Group]:
        """A group for each name and policy of an agent that is trained on: its conversations in all episodes of the row.

        Example: in each of four games on a row, the environment has opened the agent `second`: one group of four.
        """
        groups: dict[str, Group] = {}
        for trajectory in self.trajectories:
            for agent in trajectory.agents:
                if agent.trained:
                    empty = Group(id=agent.group, row=self.row, trajectories=[], baseline=self.baseline)
                    groups.setdefault(agent.group, empty).trajectories.append(agent)
        return list(groups.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What an environment returns first: the messages before the model's first turn."""

    messages: Sequence[Message]
    """At least one."""
    tools: Sequence[ToolSchema] = ()
    """The tools that the model may call."""
    sampling: SamplingChange | None = None
    """A change of the sampling from the first turn on; None uses the recipe's."""
    prompt_ids: Sequence[int] | None = None
    """For environments that write prompts as tokens, such as an agent that calls the model with token ids: the first prompt. It
    is not rendered from `messages`, which are recorded. Each later `Reply` that is not the last one then has `prompt_ids` too."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Arguments of the chat template, such as `{"enable_thinking": False}`, besides those of the recipe and of the row."""
    prefill: str = ""
    """Text that the model's first turn begins with. It is context and is not trained on."""
    watch_sampling: Callable[[], Awaitable[None]] | None = None
    """For environments that can lose interest in a turn, such as an agent whose client disconnects. Called whenever the model
    begins a turn, and cancelled when the turn is complete. If it raises, the turn is cancelled and the conversation fails."""
    done: bool = False
    """Whether the conversation ends before the model's first turn, such as a game that another player has ended. It then has no
    turns and no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Lets the model continue its last turn after the environment has cut it, added text to it, or both.

    Example: the turn was "It is 5, so done." and the reply is `Resume(keep=7, add=" Wait.")`. The model continues after
    "It is 5 Wait.". The tokens of the kept text stay as they were sampled and are trained on. The added text is context and is
    not trained on.
    """

    keep: int | None = None
    """How many characters of `turn.text` are kept; None keeps all. A token that is cut in two becomes context."""
    add: str = ""
    """Text that is added after the kept text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Replaces the end of the model's last turn with other text. The turn then ends: the model does not continue it.

    Example: the turn was "It is 5.  " and the edit is `Edit(keep=8)`. The segment then has "It is 5." and the template's end of
    the turn. The kept tokens are trained on; added text and the end of the turn are context. The other tokens are removed.
    """

    keep: int
    """How many characters of `turn.text` are kept. A token that is cut in two becomes context."""
    add: str = ""
    """Text that is added after the kept text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierHistory:
    """A history that the conversation returns to, such as that of one of several agents that take turns.

    Its segment continues: the tokens of its messages are not rendered again. A history can be returned to until it is replaced
    again; it is then a later history.
    """

    index: int
    """Index into `Trajectory.previous_histories`."""
    first_new: int
    """Index in `Reply.rewrite` of the first message that is not in that history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An environment's reply to a turn of the model."""

    messages: Sequence[Message] = ()
    """New messages, appended to the conversation."""
    reward: float | None = None
    """Added to the reward of the turn that is answered. None: the environment gives no reward, which is not the reward 0 where
    the recipe has reward functions (docs/rewards.md)."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Further parts of the reward by their names, as they are recorded in `Turn.rewards`; each is added like `reward`."""
    earlier_rewards: Mapping[int, float] = field(default_factory=dict)
    """Numbers that are added to the rewards of earlier turns, by their index: what became known only later."""
    observation: bool = False
    """Whether `messages` are an observation, such as the result of a tool that the environment called itself. Functions that
    read `trajectory["turns"]` see them with the role `tool`."""
    done: bool = False
    """Whether the conversation ends. The `messages` of the last reply are recorded, but not tokenized."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the turn's `info`."""
    outcomes: tuple[ToolOutcome, ...] = ()
    """The results of the turn's tool calls, in the order of the calls."""
    rewrite: Sequence[Message] | None = None
    """Replaces the history, before `messages` are appended. The conversation continues in a new segment."""
    returns_to: EarlierHistory | None = None
    """With `rewrite`, an earlier history which `rewrite` repeats and continues. None: the conversation continues in a new
    segment."""
    resume: Resume | None = None
    """Lets the model continue its last turn, in the same segment. Cannot be combined with `messages` or `rewrite`."""
    edit: Edit | None = None
    """Changes the end of the last turn, before `messages` are appended. Cannot be combined with `rewrite`, `resume` or `done`."""
    prefill: str = ""
    """Text that the model's next turn begins with, after `messages`. It is context and is not trained on."""
    masked: Mapping[int, Collection[int]] = field(default_factory=dict)
    """Sampled tokens that become context and are not trained on: `{0: [3, 4]}` are the fourth and the fifth token of turn 0."""
    train_on: Collection[int] = ()
    """Indexes of turns that `loss_mask` `last_round` and `after_last_user` give weight 1 too."""
    sampling: SamplingChange | None = None
    """A change of the sampling from the next turn on, which replaces an earlier change; None changes nothing."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are added to `Trajectory.metrics`."""
    tools: Sequence[ToolSchema] | None = None
    """Replaces the tools that the model may call, from the next turn on; None changes nothing, an empty list offers no tools.

    Other tools begin a new segment, for which the complete history is rendered again, because chat templates write the tools
    into the prompt. Pass new schemas: do not edit a schema in place."""
    prompt_ids: Sequence[int] | None = None
    """The complete next prompt as token ids, if the conversation began with `Opening.prompt_ids`.

    It begins with the tokens of the segment that the conversation continues in: all of them, or all up to a token of the last
    turn; the sampled tokens after that are removed. With `rewrite` and without `returns_to`, it is the prompt of a new segment.
    Example: the segment is P0 P0 A0 A0 and the prompt is P0 P0 A0 E0 E0. The second A0 is removed, and both E0 are context."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Replaces `Opening.chat_template_kwargs` from the next turn on; None changes nothing, and an empty mapping leaves those of
    the recipe and of the row. Other arguments begin a new segment, for which the complete history is rendered again."""
