"""`turnwise replay`: the environment and the rewards of recorded conversations run again, and what differs from the record.

The turns of the model are taken from the record, token by token. The loop, the session, the renderer and the scorer are those of
a run, so the replay also checks that the chat template still writes the recorded tokens between the turns. The conversations of
a policy with another tokenizer are written by its own renderer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwise import assembly
from turnwise.chat.media import process_row_media
from turnwise.chat.renderer import Renderer
from turnwise.config.recipe import load
from turnwise.engines.scripted import RecordedEngine, RecordedText
from turnwise.errors import ConfigError, RunError
from turnwise.json_yaml import parse_json, read_text
from turnwise.models.model_config import context_length
from turnwise.options.schema import Config
from turnwise.record.reader import RecordedTrajectories, episodes, trajectories_file
from turnwise.record.trajectory_json import encode_line, trajectory_record
from turnwise.rewards.credit import Credit
from turnwise.rewards.judge import UsesEngine
from turnwise.rewards.scorer import Scorer
from turnwise.rewards.turn_weights import TurnWeighting, of_all_agents
from turnwise.rollout.context import ConversationContext, TextContext
from turnwise.rollout.pipeline import with_groups_of_agents
from turnwise.rollout.rollout import rollout
from turnwise.services.chat import ChatAnswer, ContextFullError
from turnwise.services.json_service import ServiceError
from turnwise.types import Completion, Group, Message, Row, Stop, ToolSchema, Trajectory, Turn
from turnwise.user_code.calls import conversation_name

_NOT_REPLAYED = ("engine", "deadline", "internal")
"""Kinds of failures that have their cause outside of the environment and the rewards."""
_SHOWN = 120  # characters of a value
_COMPARED = (
    "stop",
    "error",
    "reward",
    "rewards",
    "metrics",
    "tools",
    "messages",
    "previous_histories",
    "template_mismatch",
)
_COMPARED_OF_TURNS = ("message", "text", "reward", "rewards", "finish_reason", "kept_tokens")
_COMPARED_OF_CALLS = ("id", "name", "arguments", "content", "error", "reward")
_COMPARED_OF_SEGMENTS = ("token_ids", "turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The replay of one conversation."""

    id: str
    differences: Sequence[str] = ()
    """A line for each difference: the place, the recorded value and the value now."""
    notes: Sequence[str] = ()
    """What could not be compared exactly, and why."""
    skipped: str | None = None
    """Why the conversation was not replayed; None if it was."""
    rewards: tuple[float, float] | None = None
    """The recorded reward and the one now; None where one is missing."""
    advantages: Sequence[tuple[float, float]] = ()
    """The recorded advantage of each turn and the one now (of tokens: their means), if advantages are computed."""


async def replay(
    run: Path,
    overrides: Sequence[str] = (),
    *,
    id: str | None = None,
    evaluation: bool = False,
    damaged: list[str] | None = None,
) -> list[Replayed]:
    """Replay the conversation `id` of a run, or all. `evaluation` reads those of the evaluations during training. With a list
    `damaged`, damaged lines of the record are left out and described in it. With an override of
    `credit`, advantages are computed too, from the rewards of now.

    Raises TurnwiseError if the run, its recipe or its rows cannot be read, or no conversation has this id.
    """
    file = trajectories_file(run / "eval_trajectories.jsonl" if evaluation else run)
    run = file.parent
    _refuse_fine_tuning(run)
    _refuse_without_effect(overrides)
    config, _ = load(run / "config.yaml", overrides)
    recorded = RecordedTrajectories(file, damaged=damaged)
    selected = [one for one in episodes(recorded[:]) if id in (None, one.id, *(agent.id for agent in one.agents))]
    if not selected:
        raise RunError(f"no conversation in {file} has the id {id!r}; `turnwise show {run} --last 5` prints some")
    scorer = assembly.scorer(config)
    _refuse_engine_rewards(scorer)
    credit = _new_credit(config, scorer, overrides, evaluation=evaluation)
    if not evaluation:
        _refuse_incomplete_groups(config, scorer, credit)
    needed = _scored_with(scorer, selected, recorded, steps=credit is not None)
    renderer = assembly.renderer(config, _source(run, config)) if config.engine.samples_tokens else None
    held_out = evaluation or (run / "evaluation.json").is_file()
    renderers = _Renderers(renderer, {} if renderer is None else assembly.policy_renderers(config, renderer))
    new = _empty_copies(needed, _rows(config, renderer, held_out=held_out))
    encode = None if renderer is None else renderer.encode
    async with contextlib.aclosing(assembly.environment_factory(config, encode=encode)) as environments:
        context_of = _contexts(config, renderers, environments, needed, run)
        steps = _steps(new)
        await _run_all(config, scorer, needed, new, steps, context_of)
    if credit is not None:
        _assign(credit, of_all_agents(assembly.turn_weighting(config)), steps)
    chosen = {id_of(trajectory) for trajectory in selected}
    compared: list[Replayed] = []
    for old, now in zip(needed, new, strict=True):
        if id_of(old) in chosen:
            of_now = {agent.id: agent for agent in now.agents}
            for each, its_now in [(old, now), *((agent, of_now.get(agent.id)) for agent in old.agents)]:
                compared.append(_compared(each, its_now, renderers.of(each), advantages=credit is not None))
    return compared


@dataclass(frozen=True, slots=True)
class _Renderers:
    """How messages become tokens in the conversations of a record."""

    main: Renderer | None
    """That of the trained model; None in the record of an endpoint, which has no tokens."""
    of_policies: Mapping[str, Renderer]
    """Those of policies in the process of the run, by their names."""

    def of(self, trajectory: Trajectory) -> Renderer | None:
        """That of a conversation. The turns of a policy on a server are recorded as text, and written as the model's."""
        return self.of_policies.get(trajectory.policy, self.main)


def id_of(trajectory: Trajectory) -> tuple[int | None, str]:
    """Ids of evaluations repeat in each evaluation: the step is part of the identity."""
    return trajectory.step, trajectory.id


def _refuse_fine_tuning(run: Path) -> None:
    about = run / "run.json"
    if about.is_file():
        value = parse_json(read_text(about, error=RunError), where=str(about), error=RunError)
        if isinstance(value, dict) and value.get("kind") == "sft":
            raise RunError(f"{run} is a run of `turnwise sft`, which has no environment and no rewards to replay")


def _refuse_engine_rewards(scorer: Scorer) -> None:
    for reward in scorer.functions:
        if isinstance(reward.function, UsesEngine) and reward.function.wants_engine:
            raise ConfigError(
                f"the reward function {reward.name} asks the engine of the run, and a replay starts no engine: give the judge an "
                f"`endpoint`, or remove it (reward.trajectory=...)"
            )


_OF_TRAINING = {
    *("train", "loss", "correction", "critic", "teacher", "checkpoint", "health", "loggers", "trace", "sft", "cluster"),
    *("output", "resume", "replace"),
}
"""Sections and options that change nothing in a replay."""


def _refuse_without_effect(overrides: Sequence[str]) -> None:
    for override in overrides:
        if (section := re.split(r"[.=]", override)[0]) in _OF_TRAINING:
            raise ConfigError(
                f"{override} has no effect on a replay, which runs environment, tools and rewards again, and with credit=... "
                f"computes advantages: {section} is of training"
            )


def _new_credit(config: Config, scorer: Scorer, overrides: Sequence[str], *, evaluation: bool) -> Credit | None:
    """The estimator whose advantages are compared with the recorded ones; None if the command line has no `credit`.

    Raises ConfigError if it needs what a replay does not have.
    """
    given = [override for override in overrides if re.match(r"credit[.=]", override)]
    if not given:
        return None
    if evaluation:
        raise ConfigError(f"{given[0]} has no effect with --eval: conversations of evaluations have no advantages")
    credit = assembly.credit(config, scorer)
    needed = {
        "the values of a critic": credit.needs_values is not None,
        "greedy conversations": credit.needs_baseline,
        "the rewards of earlier steps": credit.tracker is not None,
        "the penalties of reward.kl": config.reward.kl.coef > 0,
        "the scores of a teacher": config.teacher.on,
        "the estimators of other trained policies": bool(config.trained_policies),
    }
    if lacking := [name for name, needs in needed.items() if needs]:
        raise ConfigError(f"credit.name={credit.name}: a replay does not have {' and '.join(lacking)}")
    return credit


def _assign(credit: Credit, weigh_turns: TurnWeighting, steps: Mapping[int | None, Sequence[Group]]) -> None:
    """Compute the advantages of all conversations, step by step as training does."""
    for groups in steps.values():
        for group in groups:
            for trajectory in group.trajectories:
                weigh_turns(trajectory)
        credit(with_groups_of_agents(groups))


def _compares_groups(scorer: Scorer) -> bool:
    """Whether a reward function compares the conversations of a group."""
    of_one = (*scorer.trajectory, *scorer.turns)
    return bool(scorer.batch or scorer.groups) or any(reward.plan.needs_group for reward in of_one)


def _refuse_incomplete_groups(config: Config, scorer: Scorer, credit: Credit | None) -> None:
    compares = "reward compares" if _compares_groups(scorer) else "advantage compares" if credit is not None else None
    if (kept := config.record.best_and_worst) is not None and compares is not None:
        raise RunError(
            f"the run has recorded a part of each group (record.best_and_worst={kept}), and its {compares} the "
            f"conversations of a group: it cannot be computed again. Record a run without record.best_and_worst"
        )


def _scored_with(
    scorer: Scorer, selected: Sequence[Trajectory], recorded: Sequence[Trajectory], *, steps: bool
) -> list[Trajectory]:
    """The selected conversations, and those that the reward functions compare with them; with `steps`, all of their steps."""

    def together(trajectory: Trajectory) -> Any:
        if scorer.batch or steps:
            return trajectory.step
        if _compares_groups(scorer):
            return trajectory.step, trajectory.group
        return id_of(trajectory)

    if not (steps or _compares_groups(scorer)):
        return list(selected)
    wanted = {together(trajectory) for trajectory in selected}
    return [trajectory for trajectory in episodes(recorded[:]) if together(trajectory) in wanted]


def _source(run: Path, config: Config) -> str | Path:
    """Where the tokenizer of the run is: in its newest checkpoint, or in the model of the recipe."""
    checkpoint = run / "checkpoint"
    return checkpoint if (checkpoint / "tokenizer_config.json").is_file() else config.model.path


def _rows(config: Config, renderer: Renderer | None, *, held_out: bool) -> dict[str, Row]:
    rows = assembly.rows(config, held_out=held_out)
    if renderer is not None:
        rows = process_row_media(rows, renderer.vision, wanted=config.data.return_multi_modal_inputs)
    return {row.id: row for row in rows}


def _empty_copies(recorded: Sequence[Trajectory], rows: Mapping[str, Row]) -> list[Trajectory]:
    """Trajectories with the ids and rows of the recorded ones. Raises RunError if a row is not in the data any more."""
    missing = [trajectory.row.id for trajectory in recorded if trajectory.row.id not in rows]
    if missing:
        raise RunError(
            f"row {missing[0]!r} of the record is not among the {len(rows)} rows of the data: restore the data set, or set "
            f"data.train or data.eval to where it is"
        )
    return [Trajectory(id=t.id, group=t.group, row=rows[t.row.id], step=t.step) for t in recorded]


def _contexts(
    config: Config,
    renderers: _Renderers,
    environments: assembly.Environments,
    recorded: Sequence[Trajectory],
    run: Path,
) -> Callable[[Trajectory], ConversationContext]:
    """The context of the replay of a recorded trajectory, and of its agents."""
    if (main := renderers.main) is None:
        by_id = {id_of(t): t for t in recorded}
        return lambda trajectory: TextContext(
            chat=_RecordedChat(by_id[id_of(trajectory)]),
            make_environment=environments,
            sampling=assembly.sampling(config),
            limits=assembly.limits(config, longest=None),
            policies=assembly.stand_ins(config),
        )
    turns = {id_of(t): {each.id: _recorded_turns(each, renderers) for each in (t, *t.agents)} for t in recorded}
    longest = known_context(_source(run, config))

    def of(trajectory: Trajectory) -> ConversationContext:
        def engine(renderer: Renderer) -> RecordedEngine:
            return RecordedEngine(
                turns[id_of(trajectory)],
                encode=renderer.encode,
                encode_behind=renderer.encode_continuation,
                stop_token_id=renderer.stop_token_ids[0],
            )

        policies = assembly.stand_ins(config)
        for name, own in renderers.of_policies.items():
            if own is not main:
                policies[name] = replace(policies[name], engine=engine(own), renderer=own, thinking=config.thinking)
        return assembly.rollout_context(
            config.model_copy(update={"deterministic": False}),
            main,
            engine(main),
            environments,
            longest=longest,
            policies=policies,
        )

    return of


def _recorded_turns(trajectory: Trajectory, renderers: _Renderers) -> list[Completion | RecordedText]:
    renderer = renderers.of(trajectory)
    assert renderer is not None
    return [_completion(turn, trajectory, renderer) for turn in trajectory.turns]


def known_context(source: str | Path) -> int | None:
    """The longest context of the model in tokens; None if its config.json is not on this machine."""
    file = Path(source).expanduser() / "config.json"
    if not file.is_file():
        return None
    value = parse_json(read_text(file, error=RunError), where=str(file), error=RunError)
    return context_length(value) if isinstance(value, dict) else None


def _completion(turn: Turn, trajectory: Trajectory, renderer: Renderer) -> Completion | RecordedText:
    """What the engine sampled in a turn; its text if tokens are missing, because an environment cut or masked the turn."""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for segment in trajectory.segments:
        for position, index in enumerate(segment.turn):
            if index == turn.index:
                ids.append(segment.token_ids[position])
                logprobs.append(segment.logprobs[position])
                versions.append(segment.version[position])
    stopped = bool(ids) and ids[-1] in renderer.stop_token_ids
    if renderer.decode(ids[:-1] if stopped else ids) != turn.text:
        return RecordedText(turn.text, cut=turn.finish_reason == "length")
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason="length" if turn.finish_reason == "length" else "stop",
        logprob_kind=trajectory.logprob_kind,
    )


class _RecordedChat:
    """Answers with the recorded turns of a conversation with an endpoint, and of its agents."""

    def __init__(self, recorded: Trajectory) -> None:
        self._recorded = {each.id: each for each in (recorded, *recorded.agents)}
        self._turns = {each.id: iter(each.turns) for each in self._recorded.values()}

    async def complete(
        self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = (), fields: Mapping[str, Any] | None = None
    ) -> ChatAnswer:
        recorded = self._recorded.get(conversation_name())
        if recorded is None:
            raise ServiceError(f"the conversation {conversation_name()!r} is not in the record")
        turn = next(self._turns[recorded.id], None)
        if turn is None:
            problem = f"the conversation asks for turn {len(recorded.turns)}, which is not in the record"
            raise ContextFullError(problem) if recorded.stop is Stop.CONTEXT else ServiceError(problem)
        calls = [
            {"id": call.written_id or call.id, "function": {"name": call.name, "arguments": call.text}}
            for call in turn.calls
        ]
        message = {"content": turn.text, "reasoning_content": turn.reasoning, "tool_calls": calls or None}
        return ChatAnswer(message=message, finish_reason=turn.finish_reason, usage=turn.usage)


async def _run_all(
    config: Config,
    scorer: Scorer,
    recorded: Sequence[Trajectory],
    new: Sequence[Trajectory],
    steps: Mapping[int | None, Sequence[Group]],
    context_of: Callable[[Trajectory], ConversationContext],
) -> None:
    """Run and score the conversations, whose groups are `steps`. Those that failed for a reason that is not replayed fail as
    they did."""
    slots = asyncio.Semaphore(config.max_concurrent)
    score_of = {step: scorer.scoring_callback(of_step) for step, of_step in steps.items()}

    async def run(old: Trajectory, now: Trajectory) -> None:
        async with slots:
            if old.error is not None and old.error.kind in _NOT_REPLAYED:
                now.fail(old.error)
            else:
                await rollout(now, context_of(old))
        await score_of[now.step](now)

    async with asyncio.TaskGroup() as tasks:
        for old, now in zip(recorded, new, strict=True):
            tasks.create_task(run(old, now))


def _steps(trajectories: Sequence[Trajectory]) -> dict[int | None, list[Group]]:
    """The groups of conversations, by step."""
    groups: dict[tuple[int | None, str], Group] = {}
    for trajectory in trajectories:
        key = (trajectory.step, trajectory.group)
        groups.setdefault(key, Group(id=trajectory.group, row=trajectory.row, trajectories=[])).trajectories.append(
            trajectory
        )
    steps: dict[int | None, list[Group]] = {}
    for (step, _), group in groups.items():
        steps.setdefault(step, []).append(group)
    return steps


def _compared(old: Trajectory, now: Trajectory | None, renderer: Renderer | None, *, advantages: bool) -> Replayed:
    """`now` is None for an agent that the environment did not open again."""
    if now is None:
        return Replayed(id=old.id, differences=["the environment has opened this agent, and does not now"])
    if old.error is not None and old.error.kind in _NOT_REPLAYED:
        return Replayed(id=old.id, skipped=f"it failed: {old.error.kind}: {old.error.message}")
    encoded = [
        turn.index
        for turn in old.turns
        if renderer is not None and isinstance(_completion(turn, old, renderer), RecordedText)
    ]
    notes = [f"turn {index}: not all of its tokens are in the record, so its text was encoded" for index in encoded]
    before, after = (_comparable(one, advantages=advantages) for one in (old, now))
    rewards = None if old.reward is None or now.reward is None else (old.reward, now.reward)
    estimates = zip(_means(old.advantages), _means(now.advantages), strict=False) if advantages else ()
    return Replayed(
        id=old.id,
        differences=list(_differences(before, after, "")),
        notes=notes,
        rewards=rewards,
        advantages=list(estimates),
    )


def _means(advantages: Sequence[float | Sequence[float]]) -> list[float]:
    """The advantage of each turn; of one with advantages of tokens, their mean."""
    return [each if isinstance(each, int | float) else sum(each) / max(len(each), 1) for each in advantages]


def _comparable(trajectory: Trajectory, *, advantages: bool) -> dict[str, Any]:
    """The parts of a trajectory's record that a replay compares, as JSON values."""
    record = json.loads(encode_line(trajectory_record(trajectory)))
    chosen: dict[str, Any] = {key: record.get(key) for key in _COMPARED}
    if chosen["error"] is not None:
        chosen["error"] = {key: chosen["error"][key] for key in ("kind", "message")}
    chosen["row"] = {**record["row"], **record.get("row_columns", {})}
    chosen["turns"] = [
        {
            **{key: turn.get(key) for key in (*_COMPARED_OF_TURNS, *(["advantage"] if advantages else []))},
            # earlier versions did not record parts that are 0
            "rewards": {source: part for source, part in (turn.get("rewards") or {}).items() if part},
            "tool_calls": [{key: call.get(key) for key in _COMPARED_OF_CALLS} for call in turn["tool_calls"]],
        }
        for turn in record["turns"]
    ]
    chosen["segments"] = [{key: segment[key] for key in _COMPARED_OF_SEGMENTS} for segment in record["segments"]]
    return chosen


def _differences(old: Any, now: Any, place: str) -> Iterator[str]:
    """A line for each place at which two JSON values differ. Of two lists of numbers, the first place only."""
    if isinstance(old, dict) and isinstance(now, dict):
        for key in [*old, *(key for key in now if key not in old)]:
            yield from _differences(old.get(key), now.get(key), f"{place}.{key}" if place else str(key))
    elif isinstance(old, list) and isinstance(now, list):
        numbers = all(isinstance(item, int | float) for item in [*old, *now])
        for number, (a, b) in enumerate(zip(old, now, strict=False)):
            found = list(_differences(a, b, f"{place}[{number}]"))
            yield from found
            if found and numbers:
                return
        if len(old) != len(now):
            yield f"{place}: {len(old)} recorded, {len(now)} now"
    elif isinstance(old, float) or isinstance(now, float):
        if not (
            isinstance(old, int | float) and isinstance(now, int | float) and abs(old - now) <= 1e-9 * max(1, abs(old))
        ):
            yield f"{place}: {old} recorded, {now} now"
    elif old != now:
        yield f"{place}: {_short(old, now)} recorded, {_short(now, old)} now"


def _short(value: Any, other: Any) -> str:
    """A value as text; of a long text, the part that begins shortly before the first difference."""
    if not isinstance(value, str):
        text = json.dumps(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    same = 0
    if isinstance(other, str):
        same = next(
            (n for n, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), min(len(value), len(other))
        )
    begin = max(0, same - _SHOWN // 3) if len(value) > _SHOWN else 0
    part = value[begin : begin + _SHOWN]
    return f"{'...' if begin else ''}{part!r}{'...' if begin + _SHOWN < len(value) else ''}"
