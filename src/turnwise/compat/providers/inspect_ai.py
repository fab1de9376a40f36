"""`environment: inspect:file.py@task`: a task of Inspect, with its samples, solver, tools and scorers.

Each conversation is one sample. The solver runs as in the library, with the limits of the task, and each of its `generate` calls
is a turn of the conversation: no server, and the tokens of the session are those that were sampled. The scorers are the parts of
the reward. `eval` of the library cannot run here, because it allows one evaluation in a process; `_Sample` does with one sample
what it does, with functions of inspect_ai 0.3.285 that are not public."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import importlib
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.object_factory import plain
from turnwise.compat.providers.library_thread import LibraryRollouts
from turnwise.compat.providers.provider import About
from turnwise.data.rows import ProvidedRows
from turnwise.environments.agents.environment import AgentConnection, AgentError, AgentResult
from turnwise.environments.agents.requests import (
    AgentAnswer,
    AgentConversation,
    ChatRequest,
    Refused,
    ToolChoice,
    content_text,
    forced_parameters,
    function_tool,
    sampling_change,
    tool_call,
)
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Message, Row

_ENDED = 410
"""The status of a request after the end of the conversation."""
_OWN = ("max_tokens", "stop_seqs")
"""The parameters of a request that have an effect."""
_NO_REQUEST = {
    *(
        "max_connections",
        "max_retries",
        "timeout",
        "attempt_timeout",
        "adaptive_connections",
        "batch",
        "cache",
        "max_tool_output",
    ),
    *("system_message", "parallel_tool_calls", "internal_tools", "reasoning_history", "cache_prompt", "modalities"),
}
"""Parameters that are not about sampling."""


class InspectTask(LibraryRollouts):
    """Makes conversations about the samples of a task (an EnvironmentSource with rows).

    Args:
        name: A task in a file, `file.py@task` (or `file.py` with one task), or a registered name, such as `inspect_evals/gsm8k`.
        arguments: Keyword arguments of the task.
        eval_arguments: Those of the held-out rows instead, such as `{split: test}`. Null: the held-out rows are the same samples.
        model_roles: Other models by their roles, such as `{grader: openai/gpt-5-mini}`, as the library names them.
        seconds_to_finish: How long the task may score and clean up after a limit of the recipe has ended the conversation.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        eval_arguments: Mapping[str, Any] | None = None,
        model_roles: Mapping[str, str] | None = None,
        seconds_to_finish: float = 60.0,
    ) -> None:
        super().__init__(f"inspect:{name}", seconds_to_finish)
        self.name = name
        self._tasks = {False: _load(name, dict(arguments or {}))}
        self._tasks[True] = (
            self._tasks[False] if eval_arguments is None else _load(name, {**(arguments or {}), **eval_arguments})
        )
        for task in self._tasks.values():
            _refuse_task(name, task)
        self._roles = _roles(model_roles or {})

    @classmethod
    def names(cls) -> Sequence[str]:
        """The tasks of installed packages."""
        return _registered()

    def about(self) -> About:
        """What the task brings."""
        return About(rows=f"{len(self._tasks[False].dataset)} samples", rewards=_scorer_names(self._tasks[False]))

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """A row for each sample."""
        held = {"held_out": True} if held_out else {}
        samples = list(self._tasks[held_out].dataset)[:count]
        return ProvidedRows(
            records=(
                {"sample": n, "sample_id": n + 1 if sample.id is None else sample.id, **held}
                for n, sample in enumerate(samples)
            )
        )

    async def run(self, row: Row, row_json: str, connection: AgentConnection) -> AgentResult:
        """One sample and its scores. Raises AgentError."""
        task, number = self._tasks[bool(row.fields.get("held_out"))], row["sample"]
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(task.dataset):
            raise AgentError(
                f"row {row.id!r} has sample={number!r:.80}; inspect:{self.name} has the samples 0 to {len(task.dataset) - 1}"
            )
        played = _Sample(task, task.dataset[number], number, connection.conversation, self._roles)
        return self._result(await self.in_library(played.run))

    def _result(self, scores: Mapping[str, Any]) -> AgentResult:
        """The scores as parts of the reward; those of a dictionary are a part for each of its keys."""
        to_float = _library("scorer").value_to_float()
        parts: dict[str, float] = {}
        for name, score in scores.items():
            values = score.value if isinstance(score.value, Mapping) else {"": score.value}
            for key, value in values.items():
                if isinstance(value, Mapping | list | tuple) or value is None:
                    raise AgentError(
                        f"inspect:{self.name}: the scorer {name} gave {score.value!r:.200}, which is no number"
                    )
                number = float(to_float(value))
                if math.isfinite(number):  # a score that is not a number was not given, as with `Score.unscored`
                    parts[f"{name}/{key}" if key else name] = number
        if not parts:
            raise AgentError(f"inspect:{self.name}: its scorers gave no score")
        shown = {
            name: {"value": score.value, "answer": score.answer, "explanation": score.explanation}
            for name, score in scores.items()
        }
        return AgentResult(rewards=parts, info={"scores": plain(shown)})


# loading


def _library(module: str) -> Any:
    """A module of the library, which need not be installed where types are checked."""
    return importlib.import_module(f"inspect_ai.{module}")


def _registered() -> list[str]:
    """The names of the tasks of the packages that are imported."""
    registry = _library("_util.registry")
    return sorted(registry.registry_info(one).name for one in registry.registry_find(lambda info: info.type == "task"))


def _load(name: str, arguments: dict[str, Any]) -> Any:
    """The task of a name. Raises ConfigError."""
    file = name.partition("@")[0]
    in_file = file.endswith(".py")
    if in_file and not Path(file).is_file():
        raise ConfigError(f"environment: inspect:{name}: there is no file {file}")
    known = _tasks_of(file) if in_file else _names_of_packages(name)
    wanted = name.partition("@")[2] if in_file else name
    if in_file and not wanted and len(known) == 1:
        wanted = known[0]
    if wanted not in known:
        where = (
            f"its tasks are {', '.join(known) or 'none'}"
            if in_file
            else "`turnwise envs inspect` lists the installed ones"
        )
        raise ConfigError(
            f"environment: inspect:{name} names no task{nearest(wanted, known)}; {where}"
            + (f": write inspect:{file}@TASK" if in_file and known else "")
        )
    spec = f"{Path(file).absolute()}@{wanted}" if in_file else wanted
    try:
        with boundary("environment"):
            (task,) = _library("_eval.loader").load_tasks([spec], arguments)
    except Failed as failed:
        raise ConfigError(f"environment: inspect:{name} cannot be loaded: {failed.failure.message}") from failed
    taken = inspect.signature(_library("_util.registry").registry_lookup("task", wanted)).parameters
    if unknown := [key for key in arguments if key not in taken]:  # the library leaves them out with a warning
        raise ConfigError(
            f"environment: inspect:{name} has no parameter {unknown[0]!r}{nearest(unknown[0], taken)}; it has "
            f"{', '.join(taken) or 'none'}"
        )
    return task


def _names_of_packages(name: str) -> list[str]:
    """The registered tasks, after those of the package that a name begins with are there."""
    try:
        with boundary("environment"):
            _library("_util.registry").registry_lookup("task", name)
    except Failed as failed:
        raise ConfigError(f"environment: inspect:{name} cannot be imported: {failed.failure.message}") from failed
    return _registered()


def _tasks_of(file: str) -> list[str]:
    """The names of the tasks in a file. Imports nothing."""
    return [name for name, _ in _library("_util.decorator").parse_decorators(Path(file), "task")]


def _refuse_task(name: str, task: Any) -> None:
    """Raises ConfigError for what cannot run here."""
    if not task.scorer:
        raise ConfigError(f"environment: inspect:{name} has no scorer, so it gives no reward")
    ignored = {
        "an approval policy": task.approval is not None,
        "a working_limit (set time_limit)": task.working_limit is not None,
        "early_stopping": task.early_stopping is not None,
    }
    if found := [what for what, there in ignored.items() if there]:
        raise ConfigError(
            f"environment: inspect:{name} has {found[0]}, which has no effect here: remove it from the task"
        )
    sandboxed = task.sandbox is not None or any(sample.sandbox is not None for sample in task.dataset)
    if sandboxed:
        raise ConfigError(
            f"environment: inspect:{name} needs a sandbox of Inspect ({task.sandbox or 'of its samples'}), which turnwise does "
            f"not start: use Inspect's own eval, or tasks in Harbor's format (harbor:FOLDER)"
        )


def _roles(given: Mapping[str, str]) -> dict[str, Any]:
    """Models of the library by their roles. Raises ConfigError."""
    roles: dict[str, Any] = {}
    for role, name in given.items():
        try:
            with boundary("environment"):
                roles[role] = _library("model").get_model(name)
        except Failed as failed:
            raise ConfigError(
                f"environment.arguments.model_roles.{role}: {name!r:.80} cannot be used: {failed.failure.message}"
            ) from failed
    return roles


def _scorer_names(task: Any) -> list[str]:
    unique, names = _library("scorer._scorer").unique_scorer_name, list[str]()
    for scorer in task.scorer or ():
        names.append(unique(scorer, names))
    return names


# one sample


class _Sample:
    """One sample in the library's own contexts."""

    def __init__(
        self, task: Any, sample: Any, number: int, conversation: AgentConversation, roles: Mapping[str, Any]
    ) -> None:
        self._task, self._sample = task, copy.deepcopy(sample)
        self._sample.id = number + 1 if self._sample.id is None else self._sample.id
        self._roles = dict(roles)
        self._scoring = False
        self._model = _library("model").Model(_api_class()(conversation, self._refuse_scorer), task.config)

    async def run(self) -> dict[str, Any]:
        """The scores by the names of the scorers."""
        state = self._state()
        transcript = self._begin(state)
        task = self._task
        active = _library("log._samples").active_sample(
            task=task.name,
            log_location="",
            model=str(state.model),
            sample=self._sample,
            epoch=1,
            message_limit=task.message_limit,
            token_limit=task.token_limit,
            cost_limit=task.cost_limit,
            time_limit=task.time_limit,
            working_limit=None,
            fails_on_error=True,
            transcript=transcript,
            eval_id=state.uuid,
            sample_uuid=state.uuid,
        )
        async with active as sample:
            try:
                state = await self._solved(state, sample)
                return await self._scored(state)
            finally:
                if task.cleanup is not None:
                    await task.cleanup(state)

    async def _solved(self, state: Any, active: Any) -> Any:
        """The state after the solvers, or when a limit has ended them."""
        limits = _library("util._limit")
        ended = (limits.LimitExceededError, _library("_util.exception").TerminateSampleError)
        plan = _library("_eval.task.run").resolve_plan(self._task, None)
        with_limits = (
            state._token_limit,
            state._cost_limit,
            state._message_limit,
            limits.turn_limit(self._task.turn_limit),
            limits.time_limit(self._task.time_limit),
        )
        try:
            with contextlib.ExitStack() as entered:
                for limit in with_limits:
                    entered.enter_context(limit)
                async with importlib.import_module("anyio").create_task_group() as group:
                    active.start(group)
                    state = await plan(state, self._generate)
                    group.cancel_scope.cancel()  # what the sample runs in the background
        except (*ended, ExceptionGroup) as error:
            if not isinstance(inner := _inner(error), ended):
                raise inner from None
            state = _library("solver._task_state").sample_state() or state
        state.completed = True
        return state

    def _state(self) -> Any:
        task, sample = self._task, self._sample
        state = _library("solver._task_state")
        return state.TaskState(
            sample_id=sample.id,
            epoch=1,
            model=_library("model").ModelName(self._model),
            input=sample.input,
            target=_library("scorer").Target(sample.target),
            choices=sample.choices,
            messages=_library("_eval.task.util").sample_messages(sample),
            message_limit=task.message_limit,
            token_limit=task.token_limit,
            cost_limit=task.cost_limit,
            completed=False,
            metadata=sample.metadata or {},
        )

    def _begin(self, state: Any) -> Any:
        """Set the context variables that solvers, tools and scorers read. Returns the transcript."""
        _library("_eval.context").init_model_context(self._model, self._roles, self._task.config)
        _library("model._model").init_sample_model_data()
        _library("solver._task_state").set_sample_state(state)
        transcripts = _library("log._transcript")
        transcript = transcripts.Transcript()
        transcripts.init_transcript(transcript)
        _library("util._store").init_subtask_store(state.store)
        target = _library("scorer").Target(self._sample.target)
        _library("scorer._score").init_scoring_context(self._task.scorer, target)
        return transcript

    async def _generate(self, state: Any, tool_calls: Any = "loop", cache: Any = None, **more: Any) -> Any:
        """What solvers call: a turn, the tools that it calls, and so on."""
        config = self._task.config.merge(_library("model").GenerateConfig(**more))
        generate = _library("_eval.task.generate").task_generate
        return await generate(model=self._model, state=state, tool_calls=tool_calls, cache=False, config=config)

    async def _scored(self, state: Any) -> dict[str, Any]:
        """The scores of a state. Scorers have no turns of the model."""
        self._scoring = True
        _library("solver._task_state").set_sample_state(state)
        state.scores = {} if state.scores is None else state.scores
        unique, found = _library("scorer._scorer").unique_scorer_name, dict(state.scores)
        for scorer in self._task.scorer:
            name = unique(scorer, list(found))
            score = await scorer(state, _library("scorer").Target(self._sample.target))
            if score is not None:
                found[name] = state.scores[name] = score
        return found

    def _refuse_scorer(self) -> None:
        """Raises Refused if a scorer asks the model itself."""
        if self._scoring:
            raise Refused(
                400,
                "a scorer asks the model that is trained: name another in environment.arguments.model_roles, such as "
                "{grader: openai/gpt-5-mini}",
            )


def _inner(error: BaseException) -> BaseException:
    """The first error of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# the model's turns


@functools.cache
def _api_class() -> type[Any]:
    """The class of the library's model, made and registered when the library is there."""
    model, errors = _library("model"), _library("util._limit")

    class ConversationApi(model.ModelAPI):  # type: ignore[misc, name-defined]
        """Hands the requests of one sample to its conversation. The event loop of the conversation is another one."""

        def __init__(self, conversation: AgentConversation, check: Any, *more: Any, **options: Any) -> None:
            super().__init__("conversation")
            self._conversation, self._check = conversation, check

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            conversation: AgentConversation = self._conversation
            try:
                self._check()
                request = _request(input, tools, tool_choice, config)
                # limits of the task may be over while the model samples: then it is the last turn
                asked = asyncio.run_coroutine_threadsafe(conversation.ask(request, finish=True), conversation.loop)
                answer = await asyncio.wrap_future(asked)
            except Refused as refused:
                if refused.status == _ENDED:  # the library ends and scores such a sample
                    raise errors.LimitExceededError("custom", value=1, limit=1, message=refused.message) from refused
                raise AgentError(refused.message) from refused
            return _output(model, answer)

        def should_retry(self, ex: Any) -> bool:
            return False

        def max_connections(self) -> int:
            return 1 << 20

        def connection_key(self) -> str:
            return f"turnwise-{id(self)}"

    return model.modelapi(name="turnwise")(ConversationApi)


def _request(messages: Sequence[Any], tools: Sequence[Any], choice: Any, config: Any) -> ChatRequest:
    """A request of the library. Raises Refused for what no model here can do."""
    body = {name: value for name, value in config.model_dump(exclude_none=True).items() if name not in _NO_REQUEST}
    schemas = [
        function_tool(tool.name, tool.description, tool.parameters.model_dump(exclude_none=True, by_alias=True))
        for tool in tools
    ]
    if choice == "none":
        schemas = []
    named = getattr(choice, "name", None)
    given = {"type": "function", "function": {"name": named}} if named else "required" if choice == "any" else "auto"
    return ChatRequest(
        messages=[_message(message) for message in messages],
        tools=schemas,
        sampling=sampling_change(body, max_tokens=_OWN[:1], stop="stop_seqs", choice=ToolChoice.of(schemas, given)),
        forced=forced_parameters(body, read=_OWN),
    )


def _message(message: Any) -> Message:
    """A message of the library in the OpenAI format."""
    parts = (
        [{"type": "text", "text": message.content}]
        if isinstance(message.content, str)
        else [part.model_dump(exclude_none=True) for part in message.content]
    )
    thoughts = [str(part.get("reasoning", "")) for part in parts if part["type"] == "reasoning"]
    shown = [
        {"type": "text", "text": part["text"]} if part["type"] == "text" else part
        for part in parts
        if part["type"] != "reasoning"
    ]
    if all(part["type"] == "text" for part in shown):
        content: Any = "\n".join(part["text"] for part in shown)
    else:
        content = content_text([_image(part) for part in shown], f"a message of {message.role}")
    found: Message = {"role": message.role, "content": content}
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
        if message.error is not None:
            found["content"] = f"Error: {message.error.message}"
    if message.role == "assistant":
        if thoughts:
            found["reasoning_content"] = "\n".join(thoughts)
        if message.tool_calls:
            found["tool_calls"] = [tool_call(call.id, call.function, call.arguments) for call in message.tool_calls]
    return found


def _image(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": part["image"]}} if part["type"] == "image" else dict(part)


def _output(model: Any, answer: AgentAnswer) -> Any:
    """The model's turn as the library takes it."""
    parse = _library("model._call_tools").parse_tool_call
    calls = [parse(call["id"], call["function"]["name"], call["function"]["arguments"], None) for call in answer.calls]
    content: Any = answer.text
    if answer.reasoning:
        content = [
            _library("model").ContentReasoning(reasoning=answer.reasoning),
            _library("model").ContentText(text=answer.text),
        ]
    message = model.ChatMessageAssistant(
        content=content, tool_calls=calls or None, model="conversation", source="generate"
    )
    reason = "max_tokens" if answer.cut else "tool_calls" if calls else "stop"
    return model.ModelOutput(
        model="conversation",
        choices=[model.ChatCompletionChoice(message=message, stop_reason=reason)],
        usage=model.ModelUsage(
            input_tokens=answer.prompt_tokens,
            output_tokens=answer.completion_tokens,
            total_tokens=answer.prompt_tokens + answer.completion_tokens,
        ),
    )
