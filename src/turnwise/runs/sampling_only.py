"""Conversations without training, as in `turnwise rollout` and `turnwise eval`: sampled, scored, and written down as they end.

Such runs share rows, rewards, environments, and the engine or the endpoint that answers. The loop is that of training.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise import assembly
from turnwise.chat.media import process_row_media
from turnwise.chat.media_parts import has_media
from turnwise.chat.renderer import Renderer
from turnwise.doctor.template import preflight, preflight_rows, unread_columns
from turnwise.engines.engine import closing
from turnwise.errors import ConfigError, DataError, RolloutError
from turnwise.models.model_config import context_length
from turnwise.options.schema import Config
from turnwise.record.lines import SUFFIX, existing_file, is_compressed
from turnwise.record.metrics import conversation_metrics, cut_answers, failures, template_mismatches
from turnwise.record.run_directory import RunLock, refuse_run_directory
from turnwise.record.writer import write_config, write_trajectories, writing
from turnwise.rewards.scorer import Scorer
from turnwise.rewards.turn_weights import of_all_agents
from turnwise.rollout.context import ConversationContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.terminal.conversation import log_conversation
from turnwise.terminal.report import progress
from turnwise.types import Group, Row, Sampling, Trajectory

# what such runs share


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRun:
    """What the conversations of a run without training use, before a model is loaded."""

    config: Config
    renderer: Renderer | None
    """None with an endpoint, which gets messages."""
    scorer: Scorer
    sampling: Sampling
    notes: Sequence[str]
    """Notes for the person who starts the run."""

    def keep_rows(self, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
        """The rows whose prompts are not too long (`data.max_prompt_tokens`), and notes: on the others, and on the chat template
        under the rows' own arguments, and on columns that nothing reads. Raises DataError."""
        unread = unread_columns(self.config, rows)
        if self.renderer is None:
            return list(rows), unread
        notes = unread + preflight_rows(self.config, self.renderer, rows)
        kept, dropped = assembly.drop_long_prompts(self.config, rows, self.renderer)
        return kept, [*notes, *dropped]

    def process(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in the form that the conversations need, compared with the columns that the reward functions ask for.

        Raises ConfigError or DataError.
        """
        self.scorer.refuse_unknown_columns(rows)
        if self.renderer is not None:
            wanted = self.config.data.return_multi_modal_inputs
            return process_row_media(rows, self.renderer.vision, wanted=wanted)
        if (row := next((row for row in rows if has_media(row.messages)), None)) is not None:
            raise ConfigError(
                f"row {row.id!r} contains an image or a video, and engine.name=openai gets text only: use an engine that samples "
                f"tokens, or rows without images"
            )
        return list(rows)


def prepare(config: Config, sampling: Sampling) -> SamplingRun:
    """Read the tokenizer, build the rewards and check the recipe. Raises TurnwiseError."""
    scorer = assembly.scorer(config)
    if not config.engine.samples_tokens:
        assembly.refuse_for_endpoint(config, scorer, sampling)
        renderer, notes = None, assembly.endpoint_notes(config)
    else:
        renderer = assembly.renderer(config)
        notes = preflight(config, renderer, source=config.model.path)
    return SamplingRun(config=config, renderer=renderer, scorer=scorer, sampling=sampling, notes=notes)


@contextlib.asynccontextmanager
async def conversation_context(
    conversations: SamplingRun, *, scripts: assembly.Scripts | None = None
) -> AsyncIterator[ConversationContext]:
    """The context of the conversations: environments, and the loaded engine or the endpoint. All are closed at the end.

    `scripts` are the texts of the scripted engine by conversation id. Raises TurnwiseError.
    """
    config, renderer = conversations.config, conversations.renderer
    encode = None if renderer is None else renderer.encode
    async with contextlib.aclosing(assembly.environment_factory(config, encode=encode)) as environments:
        if (endpoint := config.engine.endpoint) is not None:
            policies = assembly.agent_policies(config, None, None)
            yield assembly.text_context(config, endpoint, environments, conversations.sampling, policies)
            return
        assert renderer is not None
        model = assembly.engine_model(config)
        runner = assembly.runner(config, renderer, model, scripts=scripts)
        policies = None
        if scripts is None and config.runs_conversations_elsewhere is None:
            policies = assembly.agent_policies(config, renderer, model, engine=runner.sampler)
        assembly.connect_engine(conversations.scorer, runner.sampler, renderer)
        if config.engine.servers is not None:
            longest = assembly.longest_context(config)
        else:
            longest = context_length(model.config.to_dict()) if model is not None else None
        context = assembly.conversation_context(
            config,
            renderer,
            runner,
            environments,
            longest=longest,
            sampled=conversations.sampling,
            policies=policies,
        )
        async with closing(runner):
            await runner.start()
            yield context


# the conversations


async def collect(config: Config, out: Path, console: Console) -> dict[str, Any]:
    """Run conversations on the recipe's rows, score them, and write them to `out` in the order of the rows.

    Returns the summary, which is also the only line of `out/metrics.jsonl`. Raises TurnwiseError. If all conversations failed,
    everything is written, and then RolloutError is raised.
    """
    shown, out = out, out.absolute()  # user code may change the working directory
    conversations = prepare(config, assembly.sampling(config))
    _print(console, conversations.notes, style="dim")
    rows, notes = conversations.keep_rows(assembly.rows(config, limit=config.rollout.max_rows))
    _print(console, notes, style="dim")
    rows, weigh_turns = conversations.process(rows), of_all_agents(assembly.turn_weighting(config))
    groups = [new_group(row, size=config.rollout.samples_per_row, seed=config.seed) for row in rows]
    groups, scripts = assign_scripts(config, groups, samples="rollout.samples_per_row")
    async with conversation_context(conversations, scripts=scripts) as context:
        started = time.perf_counter()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        writer = _OrderedWriter(out, trajectories, compressed=config.record.compression == "gzip")
        score = conversations.scorer.scoring_callback(groups)
        with progress(console, len(trajectories)) as advance:

            async def done(trajectory: Trajectory) -> None:
                advance(trajectory.sampled_tokens)
                for scored in await score(trajectory):
                    weigh_turns(scored)  # nothing is trained; the record shows what training would use
                    writer.add(scored)

            await rollout_groups(groups, context, on_finished=done)
    renderer = conversations.renderer
    log_conversation(trajectories, decode=None if renderer is None else renderer.decode)
    warnings = (template_mismatches(trajectories), cut_answers(trajectories, config.limits))
    _print(console, [warning for warning in warnings if warning is not None], style="yellow")
    _print(console, failures(groups)[:5], style="red")
    summary = {
        "step": 0,
        "conversations": len(trajectories),
        **conversation_metrics(groups),
        "seconds/rollout": round(time.perf_counter() - started, 4),
    }
    writer.finish(config, summary)
    if summary["failed"] == 1.0:
        raise RolloutError(f"all {len(trajectories)} conversations failed; they are in {shown}, with their errors")
    return summary


def assign_scripts(
    config: Config, groups: Sequence[Group], *, samples: str
) -> tuple[list[Group], assembly.Scripts | None]:
    """For the scripted engine: the groups that have scripts, and the script of each trajectory. Else all groups, and None.

    The scripts say how many conversations there are: trajectories without a script are dropped. `samples` is the option for the
    number of conversations on each row. Raises DataError if there are more scripts than trajectories.
    """
    file = config.engine.script_file
    if file is None:
        return list(groups), None
    scripts = assembly.read_scripts(file)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if len(scripts) > len(trajectories):
        raise DataError(
            f"{file} has {len(scripts)} scripts, and {len(groups)} rows with "
            f"{samples}={len(groups[0].trajectories)} make {len(trajectories)} conversations; the number of "
            f"scripts and the number of conversations must be equal"
        )
    by_id: dict[str, Sequence[str]] = {}
    for trajectory, script in zip(trajectories, scripts, strict=False):
        by_id |= {trajectory.id: script.turns}
        by_id |= {f"{trajectory.id}/{agent}": texts for agent, texts in script.agents.items()}
    for group in groups:
        group.trajectories = [trajectory for trajectory in group.trajectories if trajectory.id in by_id]
    return [group for group in groups if group.trajectories], by_id


def _print(console: Console, lines: Sequence[str], *, style: str) -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


class _OrderedWriter:
    """Writes trajectories in a given order: each as soon as it and all before it have ended."""

    def __init__(self, out: Path, trajectories: Sequence[Trajectory], *, compressed: bool) -> None:
        self._out = out
        self._path = out / f"trajectories.jsonl{SUFFIX if compressed else ''}"
        self._ended: set[str] = set()
        self._waiting = list(reversed(trajectories))
        refuse_run_directory(out)
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(out)
            self._keep_previous()

    def add(self, trajectory: Trajectory) -> None:
        self._ended.add(trajectory.id)
        ready: list[Trajectory] = []
        while self._waiting and self._waiting[-1].id in self._ended:
            ready.append(self._waiting.pop())
        with writing(self._out):
            write_trajectories(self._path, ready)

    def finish(self, config: Config, summary: dict[str, Any]) -> None:
        with writing(self._out):
            (self._out / "metrics.jsonl").write_text(json.dumps(summary) + "\n", encoding="utf-8")
            write_config(self._out / "config.yaml", config)
        self._lock.release()

    def _keep_previous(self) -> None:
        """Rename the trajectories of an earlier call instead of overwriting them."""
        path = existing_file(self._out / "trajectories.jsonl")
        if path.exists():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
            suffix = SUFFIX if is_compressed(path) else ""
            path.rename(path.with_name(f"trajectories-{stamp}-{time.time_ns() % 10**6}.jsonl{suffix}"))
