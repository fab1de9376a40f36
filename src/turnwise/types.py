"""Every noun that crosses a folder.

This module knows what a conversation is made of: rows, turns, tokens, tool calls, trajectories and the reasons why they
end. It refuses to know how any of it is produced: no torch, no tokenizer, no engine, no input or output.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from turnwise.sampling import LogprobKind as LogprobKind
from turnwise.sampling import Sampling as Sampling
from turnwise.sampling import SamplingChange as SamplingChange

Message = dict[str, Any]
"""One chat message in the OpenAI format: `{"role": ..., "content": ...}`, with `tool_calls` or `tool_call_id` where due.

`content` is a text, or a list of parts: `{"type": "text", "text": ...}`, `{"type": "image", "image": ...}`,
`{"type": "video", "video": ...}`.
"""

ToolSchema = dict[str, Any]
"""One tool in the OpenAI format: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

NOT_SAMPLED = -1
"""What the columns `turn` and `version` hold where the model did not sample the token."""


class Stop(StrEnum):
    """Why a conversation ended. The values are the names in the record and in the metrics (`stop/<value>`)."""

    DONE = "done"
    """The environment said that it is over (or there was nobody left to answer the model)."""
    MAX_TURNS = "max_turns"
    """`limits.turns` model turns were taken."""
    LENGTH = "length"
    """The last turn was cut: it reached `limits.tokens_per_turn`, or `SamplingChange.max_tokens`, before its stop token."""
    MAX_TOKENS = "max_tokens"
    """`limits.tokens` were sampled in the whole trajectory."""
    MAX_RESPONSE = "max_response"
    """`limits.response_tokens` were reached by what follows the prompt, or the next prompt would reach them."""
    CONTEXT = "context"
    """The next prompt leaves no room for an answer in `limits.context`."""
    DEADLINE = "deadline"
    """A turn or the trajectory took longer than `limits.seconds_per_turn` or `limits.seconds`."""
    ERROR = "error"
    """Something broke; `Trajectory.error` says what."""

    @property
    def failed(self) -> bool:
        """Whether the conversation broke from outside: such a trajectory is kept, but neither scored nor trained on."""
        return self in (Stop.ERROR, Stop.DEADLINE)


@dataclass(frozen=True, slots=True)
class Failure:
    """What broke, as data. `kind` is the side that broke: `row`, `environment`, `engine`, `tokens`, `reward`,
    `loss_mask` or `deadline`; `internal` is a defect of turnwise itself."""

    kind: str
    message: str
    traceback: str = field(default="", compare=False)
    """The frames of the exception, innermost last, as Python prints them; those of turnwise are left out. Empty where nothing
    was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the data set: where a conversation starts."""

    id: str
    """Unique in the data set; the line's number unless a column is mapped to it."""
    messages: Sequence[Message]
    """The opening messages, at least one."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Every other column, by its name after `data.columns` was applied."""

    def __getitem__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            have = ", ".join(sorted(self.fields)) or "none"
            raise KeyError(
                f"row {self.id!r} has no column {name!r}; its columns are: {have}. "
                f"Add the column to the data, or map one to it: data.columns.{name}=<column>"
            ) from None


@dataclass(slots=True, kw_only=True)
class Media:
    """An image or a video in a sequence: where its placeholder tokens stand, and what the model sees in their place."""

    kind: Literal["image", "video"]
    start: int
    """Place of the first placeholder token in its sequence (a segment, a prompt, a piece that is about to be appended)."""
    length: int
    """How many tokens further the last placeholder is, itself included; between them there may be others (timestamps)."""
    source: Any
    """As it was given: a PIL image, or the frames of a video."""
    inputs: Mapping[str, Any]
    """What the processor made of it, by the model's own names: `pixel_values` [patches, features], `image_grid_thw` [1, 3]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an engine is asked: continue these tokens."""

    conversation: str
    """The trajectory's id: an engine may keep what it computed for it until `Engine.release`."""
    token_ids: Sequence[int]
    """The whole prompt, from the first token."""
    media: Sequence[Media] = ()
    """The images and videos in it, in order."""
    sampling: Sampling
    seed: int = 0
    """Of this request's own random stream: the same seed draws the same numbers in whatever company."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine answers. All columns have the length of `token_ids`.

    Example: a turn of two tokens, the second one the stop token::

        Completion(token_ids=[17, 2], logprobs=[-0.4, -0.01], versions=[3, 3], finish_reason="stop", logprob_kind="sampled")
    """

    token_ids: Sequence[int]
    """The sampled tokens, the stop token included where one was sampled."""
    logprobs: Sequence[float]
    """Natural logarithms; of which distribution, `logprob_kind` says."""
    versions: Sequence[int]
    """The version of the weights that sampled each token."""
    finish_reason: Literal["stop", "length"]
    logprob_kind: LogprobKind
    raw_logprobs: Sequence[float] | None = None
    """`log_softmax(logits)` of the same tokens, where the engine knows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as the model wrote it. A call that could not be read has `error` and goes back to the model as one."""

    id: str
    """`written_id` where that can be used; otherwise `call_<n>`, counted over the conversation. Unique within a turn."""
    name: str
    arguments: Mapping[str, Any]
    text: str
    """The model's own words."""
    written_id: str = ""
    """The id that the model wrote for the call; empty where its format has none. Example: Kimi's `functions.lookup:0`."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """A call and what came of it."""

    id: str
    name: str
    arguments: Mapping[str, Any]
    content: str
    """What the model was told."""
    error: str | None = None
    """The kind of error, or None: `malformed`, `unknown_tool`, `arguments`, `parallel`, `raised`, `timeout`."""
    reward: float = 0.0
    """What the tool gave for the call; part of the turn's reward."""
    seconds: float = 0.0
    attempts: int = 1
    """How often the tool was tried."""
    traceback: str = field(default="", compare=False)
    """The frames of the exception, where the tool raised one; the model is not told of them."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn of the model: what it said, and what that was worth."""

    index: int
    message: Message
    """The parsed assistant message: `content`, and `tool_calls` where there are any."""
    text: str
    """The sampled text as it was said, the stop token left off."""
    message_index: int | None = None
    """Index of `message` in the history in which the turn was sampled, so that `history[:message_index]` are the messages
    that the model answered. None in trajectories that were read from records of schema 1."""
    history: int = 0
    """Which history that is: an index into `Trajectory.previous_histories`, or its length for `Trajectory.messages`."""
    thought_opening: str = ""
    """What the generation prompt opened a thought with, directly before `text`: `"<think>\\n"`; empty where it opened none."""
    reasoning: str = ""
    """What of it was thought and not said to anybody; empty where the model does not think in marks of its own."""
    weight: float = 1.0
    """Of its tokens in the loss: 0 leaves the turn out. Set by `loss_mask`."""
    learn_from: bool = False
    """The environment has declared the turn to be learnt from (`Reply.learn_from`)."""
    kept_tokens: int | None = None
    """How many of its sampled tokens stayed, where the environment cut the answer and continued it (`Reply.resume`)."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls in it, malformed ones included."""
    outcomes: tuple[ToolOutcome, ...] = ()
    """What came of the calls that were run."""
    tools: Sequence[ToolSchema] = ()
    """The tools that the model was offered when it sampled this turn."""
    reward: float = 0.0
    """The sum of `rewards`. Written by `add_reward` only."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The parts of `reward` by source: `environment`, `final_reward`, or the name of a reward function. A source that gave 0
    has no entry."""
    info: dict[str, Any] = field(default_factory=dict)
    """Whatever the environment wants to keep with the turn; JSON-serialisable."""
    finish_reason: str = "stop"
    completion: Completion | None = None
    """As the engine gave it; not part of the record."""
    started: float | None = None
    """When the prompt of the turn was encoded and sent to the engine, in Unix seconds; None where unknown."""
    seconds_engine: float = 0.0
    seconds_environment: float = 0.0

    def add_reward(self, value: float, source: str) -> None:
        """Add to the turn's reward. No other code writes it."""
        self.reward += value
        if value:
            self.rewards[source] = self.rewards.get(source, 0.0) + value

    @property
    def ended(self) -> float | None:
        """When the environment had answered the turn, in Unix seconds; None where unknown."""
        return None if self.started is None else self.started + self.seconds_engine + self.seconds_environment


@dataclass(slots=True)
class Segment:
    """An unbroken token sequence: one row to train on. Four columns of equal length, appended to and never edited.

    There are two exceptions: an environment may take the end of an answer back and continue it (`cut`, by `Reply.resume`), and
    it may declare that sampled tokens are not to be learnt from (`leave_out`, by `Reply.masked`).

    Example: prompt P0 (2 tokens), answer A0 (2), what the environment said E0 (1), answer A1 (1)::

        token_ids = P0 P0 A0 A0 E0 A1
        turn      = -1 -1  0  0 -1  1
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    """0 where the model did not sample."""
    turn: array[int] = field(default_factory=lambda: array("i"))
    """Index of the turn that sampled the token, or -1. The loss mask *is* `turn >= 0`."""
    version: array[int] = field(default_factory=lambda: array("i"))
    """Version of the weights that sampled the token, or -1."""
    media: list[Media] = field(default_factory=list)
    """The images and videos among the tokens, in order."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_context(self, token_ids: Sequence[int], media: Sequence[Media] = ()) -> None:
        """Append tokens that the model did not sample; the places of `media` count from the first of them."""
        count = len(token_ids)
        self.media.extend(replace(one, start=one.start + len(self)) for one in media)
        self.token_ids.extend(token_ids)
        self.logprobs.extend([0.0] * count)
        self.turn.extend([NOT_SAMPLED] * count)
        self.version.extend([NOT_SAMPLED] * count)

    def append_completion(self, turn: int, completion: Completion) -> None:
        """Append what the model sampled in turn `turn`.

        Raises ValueError if the completion's columns differ in length.
        """
        count = len(completion.token_ids)
        if len(completion.logprobs) != count or len(completion.versions) != count:
            raise ValueError(
                f"the engine answered {count} token ids, {len(completion.logprobs)} log-probabilities and "
                f"{len(completion.versions)} versions; the three must be of one length"
            )
        # all of them before any is appended: what is no token id must not leave the columns at different lengths
        ids, logprobs = array("i", completion.token_ids), array("f", completion.logprobs)
        versions = array("i", completion.versions)
        self.token_ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.turn.extend([turn] * count)
        self.version.extend(versions)

    def truncate(self, length: int) -> None:
        """Take back all tokens after the first `length`; only sampled ones may go."""
        if any(turn < 0 for turn in self.turn[length:]):
            raise ValueError(f"only what the model said last can be taken back, not all after token {length}")
        for column in (self.token_ids, self.logprobs, self.turn, self.version):
            del column[length:]

    def mask_tokens(self, turn: int, places: Collection[int]) -> None:
        """Make context of tokens that turn `turn` sampled, by their places among those; what was cut off is left out already."""
        sampled = [place for place, one in enumerate(self.turn) if one == turn]
        for number in places:
            if number < len(sampled):
                place = sampled[number]
                self.logprobs[place] = 0.0
                self.turn[place] = self.version[place] = NOT_SAMPLED


@dataclass(frozen=True, slots=True)
class EnvironmentHandle:
    """The object behind an environment, kept after its conversation until reward functions have been asked."""

    instance: Any
    release: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One conversation: the only source of truth about it. Reward and advantage live here, never on a segment."""

    id: str
    group: str
    row: Row
    step: int | None = None
    """The training step, counted from 1, that the trajectory was recorded in; None where there are no steps. Set when the
    trajectory is written."""
    seed: int = 0
    messages: list[Message] = field(default_factory=list)
    """The conversation as messages, all sides."""
    previous_histories: list[list[Message]] = field(default_factory=list)
    """The histories that an environment has replaced (`Reply.rewrite`), as they were."""
    tools: Sequence[ToolSchema] = ()
    turns: list[Turn] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    stop: Stop | None = None
    error: Failure | None = None
    reward: float | None = None
    """The sum of the turns' rewards and of the trajectory's; None until scored, and for ever where it failed."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The parts of `reward`, by the reward function's name; `turns` is what the environment gave."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further numbers that reward functions report; no part of `reward`."""
    advantages: list[float | Sequence[float]] = field(default_factory=list)
    """One entry for each turn; empty where the trajectory is not trained on. An entry is one number for all tokens of the turn,
    or one number for each of its sampled tokens: those whose `Segment.turn` is the turn's index, in the order of the segments."""
    logprob_kind: LogprobKind = LogprobKind.NONE
    template_mismatch: str | None = None
    """What the sanity check found, or None where the tokens are those of the template."""
    started: float | None = None
    """When the conversation began, in Unix seconds; None where unknown."""
    seconds: float = 0.0
    """How long the conversation took."""
    environment: EnvironmentHandle | None = None
    """For reward functions that look at the environment; None once the trajectory is scored. Not part of the record."""

    @property
    def failed(self) -> bool:
        """Whether the conversation broke: such a one is data, but in no statistics and not trained on."""
        return self.error is not None

    @property
    def answer(self) -> str:
        """The last thing that the model said, or an empty text."""
        return str(self.turns[-1].message.get("content") or "") if self.turns else ""

    @property
    def assistant_texts(self) -> list[str]:
        """What the model said, turn by turn: none of the tools' or the user's words."""
        return [turn.text for turn in self.turns]

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the model sampled. Of a trajectory that was read from a record, tokens that an environment cut off or
        masked are not counted."""
        if all(turn.completion is None for turn in self.turns):
            return sum(turn >= 0 for segment in self.segments for turn in segment.turn)
        return sum(len(turn.completion.token_ids) for turn in self.turns if turn.completion is not None)

    def has_advantage(self, turn: int) -> bool:
        """Whether a token of turn `turn` has an advantage other than zero."""
        advantage = self.advantages[turn]
        return advantage != 0 if isinstance(advantage, float | int) else any(advantage)

    def fail(self, failure: Failure) -> None:
        """Mark the trajectory as broken; what it holds stays."""
        self.error = failure
        self.stop = Stop.DEADLINE if failure.kind == "deadline" else Stop.ERROR
        self.reward = None
        self.advantages = []


@dataclass(slots=True, kw_only=True)
class Group:
    """The trajectories of one row that are compared with each other."""

    id: str
    row: Row
    trajectories: list[Trajectory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How an environment begins: what is on the table before the model speaks for the first time."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema] = ()
    sampling: SamplingChange | None = None
    """Changes the sampling of the first turn and the following ones; None: that of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Let the model go on with its own last answer: cut it, put words into its mouth, and let it continue.

    Example: the answer was "It is 5, so done." and `Resume(keep=7, add=" Wait.")`; the model goes on after "It is 5 Wait.".
    What was kept stays as it was sampled, token by token, and is trained on; `add` is context and is not.
    """

    keep: int | None = None
    """How many characters of `turn.text` stay; None keeps all of it. A token that is cut in two becomes context."""
    add: str = ""
    """What stands behind them, as if the model had said it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers to a turn of the model."""

    messages: Sequence[Message] = ()
    """New messages, appended to the conversation."""
    reward: float = 0.0
    """Added to the reward of the turn that is answered."""
    done: bool = False
    """Whether the conversation is over. `messages` of a last reply are recorded, but no longer tokenised."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Merged into the turn's `info`."""
    outcomes: tuple[ToolOutcome, ...] = ()
    """Of the turn's tool calls, in the order of the calls."""
    rewrite: Sequence[Message] | None = None
    """Replaces the history before `messages` are appended: the conversation goes on in a new segment."""
    resume: Resume | None = None
    """Instead of messages: the model goes on with its own answer, in the same segment."""
    prefill: str = ""
    """What the model's next answer begins with, behind `messages`: context, as if it had said it."""
    masked: Mapping[int, Collection[int]] = field(default_factory=dict)
    """What is not to be learnt from: index of a turn to places among the tokens that it sampled. They stay where they are,
    and are context in the finished record: `{0: [3, 4]}` leaves out the fourth and fifth token of the first turn."""
    learn_from: Collection[int] = ()
    """Indexes of turns that are to be learnt from even where they are not in the last round: `loss_mask` `last_round` and
    `after_last_user` give them weight 1. `{0}` where a first answer is a training record of its own."""
    sampling: SamplingChange | None = None
    """Changes the sampling of the following turns, in place of an earlier change; None: no change."""
    tools: Sequence[ToolSchema] | None = None
    """Replaces the tools that the model is offered from the next turn on; None: no change. An empty list offers none.

    Templates write the tools into the prompt, so other tools begin a new segment, with the whole history rendered again. Give new
    schemas: one that was offered must not be edited in place."""
