"""Data sets for other trainers, made from a record: the best conversations of groups, pairs, and labels (docs/record.md).

The columns are those of TRL's trainers (SFT, DPO, KTO, reward models), and `turnwise sft` reads the first of them. What was
sampled is kept as token ids beside the messages. Knows trajectories. Does not know models or templates: a conversation whose
messages do not say what was sampled is left out, with the reason.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import ConfigError, RunError
from turnwise.json_yaml import lone_surrogate
from turnwise.record.labels import read_labels
from turnwise.record.lines import line_checksum, open_lines
from turnwise.record.reader import read, trajectories_file
from turnwise.types import Message, Segment, Trajectory, Turn
from turnwise.user_code.reward_number import equal_rewards, reaches

Kind = Literal["sft", "dpo", "kto", "reward-model"]
Chosen = Set[tuple[str, int | None]]
"""The ids and steps of conversations with a label."""
KINDS: tuple[Kind, ...] = ("sft", "dpo", "kto", "reward-model")


_FIX: Mapping[Kind, str] = {
    "sft": ": set --min-reward, or sample several conversations of a row (rollout.samples_per_row)",
    "dpo": ": sample several conversations of a row (rollout.samples_per_row), or set a lower --margin",
    "reward-model": ": sample several conversations of a row (rollout.samples_per_row), or set a lower --margin",
    "kto": ": set --threshold, or sample several conversations of a row (rollout.samples_per_row)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetChoice:
    """Which conversations of a group become rows."""

    what: Kind
    best: int | None = None
    """`sft`: this many of each group, with the highest rewards. None: 1, or with `label` all."""
    min_reward: float | None = None
    """`sft`: the smallest reward. None: any reward above the lowest of the group, so that groups with equal rewards are left
    out; with `label`, any reward."""
    pairs: int = 1
    """`dpo`, `reward-model`: at most this many pairs of a group: the best with the worst, the second best with the second
    worst, and so on."""
    margin: float = 0.0
    """`dpo`, `reward-model`: the smallest difference of the rewards of a pair. Equal rewards are never a pair."""
    threshold: float | None = None
    """`kto`: the smallest reward of a desirable conversation. None: those above the mean of their group are desirable, those
    below it are not, and groups with equal rewards are left out."""
    first_step: int | None = None
    """The first training step whose conversations are used; None: of all steps."""
    last_step: int | None = None
    """The last one; None: to the end."""
    label: str | None = None
    """Only conversations to which a person gave this label in the viewer; None: all. `best` and `pairs` are among them; the mean
    of the group (`kto`) is that of all its conversations."""


@dataclass(slots=True)
class Written:
    """What `write_dataset` has done."""

    file: Path
    rows: int = 0
    groups: int = 0
    without_rows: int = 0
    """How many of these groups became no row (`dpo`, `reward-model`: have no pair)."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many conversations were left out, by reason."""


def write_dataset(run: Path, out: Path, choice: DatasetChoice) -> Written:
    """Write the data set of a run (or of a file of trajectories) to `out`/train.jsonl, one JSON object a line.

    Raises ConfigError if the file exists, or no conversation fits the choice; RunError if the record cannot be read.
    """
    written = Written(out / "train.jsonl")
    if written.file.exists():
        raise ConfigError(f"{written.file} exists already: name another directory with --out, or remove it")
    lines: list[str] = []
    chosen = None if choice.label is None else _with_label(run, choice.label, written.left_out)
    steps = Counter[int]()
    for members in _groups(read(run), choice, steps):
        rows = list(rows_of(members, choice, written.left_out, chosen))
        counts = any(_is_chosen(one, chosen) for one in members)
        written.groups += counts
        written.without_rows += counts and not rows
        lines += [json.dumps(row, ensure_ascii=False) for row in rows]
    if not lines and not written.groups and steps and choice.first_step is not None and choice.label is None:
        raise ConfigError(f"{run} has no conversation of {_asked(choice)}: its steps are {min(steps)} to {max(steps)}")
    if not lines:
        reasons = "".join(f"; {number} conversations {reason}" for reason, number in written.left_out.most_common())
        raise ConfigError(
            f"no conversation of {run} becomes a row of --what {choice.what}: {written.groups} groups were read{reasons}. Groups "
            f"with equal rewards, or one conversation, have none{_FIX[choice.what]}"
        )
    out.mkdir(parents=True, exist_ok=True)
    unfinished = written.file.with_name(f".{written.file.name}.{os.getpid()}")
    try:
        unfinished.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        unfinished.replace(written.file)  # a file of this name is complete: it makes the next call refuse
    finally:
        unfinished.unlink(missing_ok=True)
    written.rows = len(lines)
    return written


def _with_label(run: Path, label: str, left_out: Counter[str]) -> Chosen:
    """The ids and steps of the training conversations with a label. Raises ConfigError if there is none."""
    file = trajectories_file(run)
    found = read_labels(file.parent)
    labelled = {one.checksum: (one.id, one.step) for one in found if one.kind == "train" and label in one.labels}
    try:
        present = {checksum for line in open_lines(file) if (checksum := line_checksum(line)) in labelled}
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror or error}") from None
    chosen = {labelled[checksum] for checksum in present}
    if replaced := len(labelled) - len(present):
        left_out["are no longer in the record as they were when they got the label"] += replaced
    if not chosen and labelled:
        raise ConfigError(
            f"none of the {len(labelled)} conversations of {run} with the label {label!r} is in the record as it was labelled: "
            f"the run was resumed, and has sampled others. Read and label these"
        )
    if not chosen:
        labels = sorted({name for one in found if one.kind == "train" for name in one.labels})
        raise ConfigError(
            f"no conversation of {run} has the label {label!r}; it has {', '.join(labels) or 'no labels'}"
        )
    return chosen


def _is_chosen(one: Trajectory, chosen: Chosen | None) -> bool:
    return chosen is None or (one.id, one.step) in chosen


_CUT = "have a turn that a limit cut"
_REPEATED = "have the messages of another one of their group"


def sft_rows(trajectories: Iterable[Trajectory], left_out: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of `sft` of given conversations, whatever their rewards. Those that cannot be rows are counted in `left_out`."""
    for trajectory in trajectories:
        reason = _unfit(trajectory, DatasetChoice(what="sft"))
        if reason is None and _cut(trajectory):
            reason = _CUT
        if reason is None:
            yield from _sft_rows(trajectory)
        else:
            left_out[reason] += 1


def _asked(choice: DatasetChoice) -> str:
    return f"step {choice.first_step}{'' if choice.last_step is not None else ' or later'}"


def _groups(
    trajectories: Iterable[Trajectory], choice: DatasetChoice, steps: Counter[int]
) -> Iterator[list[Trajectory]]:
    """The conversations by group, of the chosen steps. Those of a training step stand together in a record. Conversations of all
    steps are counted in `steps`."""
    first = -math.inf if choice.first_step is None else choice.first_step
    last = math.inf if choice.last_step is None else choice.last_step
    step, groups = None, dict[str, list[Trajectory]]()
    for trajectory in trajectories:
        if trajectory.step != step:
            yield from groups.values()
            step, groups = trajectory.step, {}
        steps[trajectory.step or 0] += 1
        if first <= (trajectory.step or 0) <= last:
            groups.setdefault(trajectory.group, []).append(trajectory)
    yield from groups.values()


def rows_of(
    group: Sequence[Trajectory], choice: DatasetChoice, left_out: Counter[str], chosen: Chosen | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of a complete group, of all its conversations or of the `chosen`. Those that cannot be in the data set are counted
    in `left_out`, by reason."""
    scored: list[tuple[float, Trajectory]] = []
    for trajectory in group:
        reason = _unfit(trajectory, choice)
        if reason is not None:
            left_out[reason] += _is_chosen(trajectory, chosen)
        elif trajectory.reward is not None:
            scored.append((trajectory.reward, trajectory))
    scored.sort(key=lambda pair: -pair[0])  # stable: the first of equal ones
    of_group = [reward for reward, _ in scored]
    scored = [pair for pair in scored if _is_chosen(pair[1], chosen)]
    if choice.what == "sft":
        yield from _best(scored, choice, left_out)
    elif choice.what == "kto":
        yield from _labelled(scored, choice, of_group)
    else:
        yield from _pairs(scored, choice)


def _unfit(trajectory: Trajectory, choice: DatasetChoice) -> str | None:
    """Why a conversation cannot be in the data set; None if it can."""
    if trajectory.failed or trajectory.reward is None:
        return "failed or have no reward"
    if not trajectory.trained:
        why = f"policy {trajectory.policy}" if trajectory.policy else "train=False"
        return f"are of agents that are not trained on ({why})"
    if not trajectory.turns or any(turn.message_index is None for turn in trajectory.turns):
        return "have no turn of the model whose message is known"
    if any(call.error is not None for turn in trajectory.turns for call in turn.calls):
        return "have a malformed call, which messages do not show"
    if any(isinstance(message.get("content"), list) for message in trajectory.messages):
        return "have images or content in parts"
    if lone_surrogate([trajectory.messages, *trajectory.previous_histories, *_shown(trajectory)]) is not None:
        return "have half of a surrogate pair, which is no character, in a text"
    if choice.what != "sft" and (len(trajectory.segments) > 1 or trajectory.previous_histories):
        return "have several segments, so that one list of messages does not say what was sampled"
    return None


def _shown(trajectory: Trajectory) -> Iterator[Any]:
    """What else of a conversation is in a row (`_common`)."""
    yield from (trajectory.id, trajectory.group, trajectory.tools)
    for turn in trajectory.turns:
        yield from (turn.tools, turn.chat_template_kwargs)


# rows


def _best(
    scored: Sequence[tuple[float, Trajectory]], choice: DatasetChoice, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    whole = [pair for pair in scored if not _cut(pair[1])]
    ended = _distinct(whole)
    left_out += Counter({_CUT: len(scored) - len(whole), _REPEATED: len(whole) - len(ended)})
    best = choice.best if choice.best is not None else len(ended) if choice.label is not None else 1
    for reward, trajectory in ended[:best]:
        if choice.min_reward is not None:
            good = reaches(reward, choice.min_reward)
        else:
            good = choice.label is not None or not equal_rewards([reward, scored[-1][0]])
        if good:
            yield from _sft_rows(trajectory)


def _cut(trajectory: Trajectory) -> bool:
    """Whether a limit cut a turn, which then has no end. Messages do not show this."""
    return any(turn.finish_reason == "length" for turn in trajectory.turns)


def _distinct(scored: Sequence[tuple[float, Trajectory]]) -> list[tuple[float, Trajectory]]:
    """Without conversations whose messages are those of an earlier one."""
    found: dict[str, tuple[float, Trajectory]] = {}
    for reward, trajectory in scored:
        found.setdefault(_json(trajectory.messages), (reward, trajectory))
    return list(found.values())


def _sft_rows(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """A row for each segment. Each turn is trained on in one of them."""
    histories = [*trajectory.previous_histories, trajectory.messages]
    sampled = [
        (segment, [turn for turn in trajectory.turns if turn.index in set(segment.turn)])
        for segment in trajectory.segments
        if any(number >= 0 for number in segment.turn)
    ]
    of_rows: Sequence[tuple[Segment | None, Sequence[Turn]]] = sampled or [(None, trajectory.turns)]
    for segment, turns in of_rows:
        last = turns[-1]
        assert last.message_index is not None
        messages = histories[last.history][: last.message_index + 1]
        weights = {turn.message_index: turn.weight for turn in turns if turn.history == last.history}
        if not any(weights.values()):
            continue
        assistants = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        row = {
            "messages": messages,
            "weights": [weights.get(place, 0.0) for place in assistants],
            **_common(trajectory, last),
            "reward": trajectory.reward,
        }
        if segment is not None:
            by_turn = {turn.index: turn.weight for turn in turns}
            mask = [int(number >= 0 and by_turn[number] > 0) for number in segment.turn]
            end = len(mask) - mask[::-1].index(1) if 1 in mask else 0
            row |= {"input_ids": list(segment.token_ids[:end]), "assistant_masks": mask[:end]}
        yield row


def _pairs(scored: Sequence[tuple[float, Trajectory]], choice: DatasetChoice) -> Iterator[dict[str, Any]]:
    """Pairs of conversations with the same prompt. Each conversation is in at most one pair."""
    by_prompt: dict[str, list[tuple[float, Trajectory]]] = {}
    for reward, trajectory in _distinct(scored):
        prompt, _ = _parts(trajectory)
        by_prompt.setdefault(_json([prompt, trajectory.turns[0].tools]), []).append((reward, trajectory))
    for same in by_prompt.values():
        ended = [pair for pair in same if not _cut(pair[1])]
        for (better, chosen), (worse, rejected) in list(zip(ended, reversed(same), strict=False))[: choice.pairs]:
            if better <= worse or equal_rewards([better, worse]) or not reaches(better - worse, choice.margin):
                break
            yield _pair(chosen, rejected, choice)


def _pair(chosen: Trajectory, rejected: Trajectory, choice: DatasetChoice) -> dict[str, Any]:
    prompt, good = _parts(chosen)
    row = {
        "prompt": prompt,
        "chosen": good,
        "rejected": _parts(rejected)[1],
        **_common(chosen, chosen.turns[0]),
        "rejected_id": rejected.id,
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
    }
    of_chosen, of_rejected = _ids(chosen), _ids(rejected)
    if of_chosen is not None and of_rejected is not None:
        (prompt_ids, chosen_ids), (_, rejected_ids) = of_chosen, of_rejected
        # a reward model reads complete sequences
        before = prompt_ids if choice.what == "reward-model" else []
        row |= {"chosen_ids": before + chosen_ids, "rejected_ids": before + rejected_ids}
        if choice.what == "dpo":
            row["prompt_ids"] = prompt_ids
    return row


def _labelled(
    scored: Sequence[tuple[float, Trajectory]], choice: DatasetChoice, rewards: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Conversations of a group; `rewards` are those of the whole group, which may have more."""
    if not scored or (choice.threshold is None and equal_rewards(rewards)):
        return
    mean = statistics.fmean(rewards)
    for reward, trajectory in _distinct(scored):
        if choice.threshold is None and equal_rewards([reward, mean]):
            continue
        prompt, completion = _parts(trajectory)
        label = reward > mean if choice.threshold is None else reaches(reward, choice.threshold)
        if label and _cut(trajectory):
            continue
        row = {
            "prompt": prompt,
            "completion": completion,
            "label": label,
            **_common(trajectory, trajectory.turns[0]),
            "reward": reward,
        }
        ids = _ids(trajectory)
        if ids is not None:
            row |= {"prompt_ids": ids[0], "completion_ids": ids[1]}
        yield row


def _common(trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    # as text: a column of schemas has another type for each tool
    kwargs: Mapping[str, Any] = (
        {"chat_template_kwargs": dict(turn.chat_template_kwargs)} if turn.chat_template_kwargs else {}
    )
    tools = turn.tools or trajectory.tools
    return {
        "tools": json.dumps(list(tools), ensure_ascii=False),
        **kwargs,
        "id": trajectory.id,
        "group": trajectory.group,
    }


def _parts(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """The messages before the first turn of the model, and those from it to the last turn."""
    first, last = trajectory.turns[0].message_index, trajectory.turns[-1].message_index
    assert first is not None
    assert last is not None
    return trajectory.messages[:first], trajectory.messages[first : last + 1]


def _ids(trajectory: Trajectory) -> tuple[list[int], list[int]] | None:
    """The tokens before the first sampled token, and those from it to the last one. None without tokens."""
    if not trajectory.segments:
        return None
    (segment,) = trajectory.segments
    places = [place for place, number in enumerate(segment.turn) if number >= 0]
    if not places:
        return None
    tokens = list(segment.token_ids[: places[-1] + 1])
    return tokens[: places[0]], tokens[places[0] :]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
