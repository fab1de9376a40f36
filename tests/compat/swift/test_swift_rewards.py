"""Reward functions of ms-swift: what they are asked with, and the values of its own source."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.conversations import Says, a_row, hold, hold_all
from support.swift import play, whole
from turnwise.assembly import scorer
from turnwise.chat.renderer import Renderer
from turnwise.compat.swift import Reward, math_worker, outcomes, reward, scheduler
from turnwise.compat.swift.outcomes import (
    CosineReward,
    Format,
    MathAccuracy,
    MathProcess,
    ReActFormat,
    RepetitionPenalty,
    SoftOverlong,
)
from turnwise.compat.swift.rewards import RewardArgs, arguments_of, call_reward_once, orms
from turnwise.compat.swift.schedulers import MultiTurnScheduler
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rewards.functions import TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.types import Group, Trajectory

# Reward functions of ms-swift: what they are handed, and what becomes of what they give.


PLUGIN = """
from swift.rewards import ORM, AsyncORM, orms


class Length(ORM):
    def __init__(self, per=1.0):
        self.per = per

    def __call__(self, completions, solution, **kwargs):
        return [self.per * len(one) + len(two) for one, two in zip(completions, solution)]


class Later(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return [None for _ in completions]


def infos(completions, rollout_infos, trajectory_inputs, request_id, **kwargs):
    assert [len(trajectory_inputs[one]) for one in request_id] == [2]
    return [info["n"] + info["num_turns"] for info in rollout_infos]


orms["length"] = Length
orms["later"] = Later
orms["infos"] = infos
"""


class Rewrites(MultiTurnScheduler):
    """A new history after the first turn."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages = [{"role": "user", "content": "Again."}]
        return {"infer_request": infer_request, "rollout_infos": {"n": 10}}


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    file = tmp_path / "rewards.py"
    file.write_text(PLUGIN)
    yield str(file)
    for name in ("length", "later", "infos"):
        orms.pop(name, None)


def spoken(*said: str, **fields: Any) -> Trajectory:
    return whole(hold(Says(*said), scheduler, row=a_row("Hi", **fields)))


def given(trajectory: Trajectory, use: str, **options: Any) -> float:
    return asyncio.run(reward(trajectory, use=use, **options))


def test_a_class_is_made_once_with_its_arguments_and_asked_with_the_rows_columns(plugin: str) -> None:
    trajectory = spoken("four", solution="4!")
    assert given(trajectory, "length", external_plugins=[plugin]) == 6.0
    assert given(trajectory, f"{plugin}:Length", arguments={"per": 0.5}) == 4.0
    with pytest.raises(
        ConfigError, match=r"infos is a function, not a class, so arguments have no effect: remove them"
    ):
        given(trajectory, "infos", arguments={"per": 1})


def test_none_counts_nothing_and_async_functions_are_awaited(plugin: str) -> None:
    assert given(spoken("x"), "later", external_plugins=[plugin]) == 0.0


def test_rollout_infos_and_all_records_of_a_trajectory_are_handed_over(plugin: str) -> None:
    trajectory = whole(play(Rewrites, "one", "two", max_turns=2))
    assert given(trajectory, "infos", external_plugins=[plugin]) == 12.0
    completions, columns = arguments_of(trajectory)
    assert completions == ["two"]
    (records,) = columns["trajectory_inputs"].values()  # type: ignore[attr-defined]
    told = [[message["content"] for message in record["messages"]] for record in records]
    assert told == [["Hi", "one"], ["Again.", "two"]]
    assert {record["request_id"] for record in records} == {trajectory.id}
    assert columns["finish_reason"] == ["stop"]
    assert columns["response_token_ids"] == [
        [list(turn.completion.token_ids) for turn in trajectory.turns if turn.completion]
    ]


def test_a_reward_sees_the_images_of_a_conversation_and_where_they_are(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from support.conversations import scripted
    from support.vision import picture, save_vision_model
    from turnwise.chat.renderer import Renderer
    from turnwise.types import Row

    class Crops(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.images.append(infer_request.images[0].crop((0, 0, 16, 16)))
            infer_request.messages.append({"role": "user", "content": "<tool><image></tool>"})
            return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images}}

    renderer = Renderer.from_pretrained(save_vision_model(tmp_path / "sees"))
    asked = [{"type": "image", "image": picture(32, 16, seed=1)}, {"type": "text", "text": "?"}]
    row = Row(id="1", messages=[{"role": "user", "content": asked}], fields={"images": ["a.png"]})
    engine = scripted(["Let me look.", "A dog."], renderer=renderer)
    trajectory = whole(play(Crops, engine, row=row, max_turns=2, table={"renderer": renderer}))
    completions, columns = arguments_of(trajectory)
    assert completions == ["A dog."]
    assert [message["content"] for message in columns["messages"][0]] == [
        "<image>?",
        "Let me look.",
        "<tool><image></tool>",
        "A dog.",
    ]
    assert [image.size for image in columns["images"][0]] == [(32, 16), (16, 16)]
    assert columns["videos"] == [None]


def test_an_answer_that_was_cut_while_it_went_on_is_read_whole() -> None:
    class GoesOn(MultiTurnScheduler):
        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:
            infer_request.messages[-1]["content"] += ", so"
            return {"infer_request": infer_request}

    trajectory = play(GoesOn, "ab", "cdefgh", max_turns=3, table={"limits": Limits(tokens_per_turn=4)})
    assert trajectory.stop == "length"
    completions, columns = arguments_of(trajectory)
    assert completions == ["ab, socdef"]
    assert columns["is_truncated"] == [True]
    assert columns["rollout_infos"] == [{"num_turns": 2}]


@pytest.mark.parametrize("values", [[1.0, 2.0], [], 1.0, "1"])
def test_anything_but_one_number_for_one_completion_breaks_the_trajectory(values: Any) -> None:
    def odd(completions: Sequence[str], **kwargs: Any) -> Any:
        return values

    with pytest.raises(
        ValueError, match=r"the reward function odd returned .* for 1 completion; it must return a list"
    ):
        asyncio.run(call_reward_once(odd, spoken("x"), "odd"))


def test_a_text_among_the_numbers_is_refused() -> None:
    def odd(completions: Sequence[str], **kwargs: Any) -> Any:
        return ["1.0"]

    with pytest.raises(TypeError, match=r"the reward function odd gave the text '1\.0'; a reward must be a number"):
        asyncio.run(call_reward_once(odd, spoken("x"), "odd"))


def test_a_reward_that_raises_breaks_its_own_trajectory_and_no_zero_stands_in() -> None:
    def breaks(completions: Sequence[str], **kwargs: Any) -> Any:
        raise RuntimeError("no judge")

    trajectory = spoken("x")
    score = Scorer(trajectory=[TrajectoryReward("breaks", lambda one: call_reward_once(breaks, one, "breaks"))])
    asyncio.run(score.score([Group(id="g", row=trajectory.row, trajectories=[trajectory])]))
    assert trajectory.error is not None
    assert (trajectory.error.kind, trajectory.error.message.partition("RuntimeError")[2]) == ("reward", ": no judge")
    assert trajectory.reward is None


def test_an_unknown_reward_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"there is no reward function 'acuracy'; did you mean 'accuracy'\?"):
        given(spoken("x"), "acuracy")


# The reward functions that come with ms-swift: the values of its own source, and what they are asked with.


# The reward functions that come with ms-swift: the values that its own give, and what they are asked with.


OPENS = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template whose generation prompt opens a thought."""


@pytest.mark.parametrize(
    ("said", "solution", "right"),
    [  # as ms-swift's own `accuracy` decides, version 4.5.2 with math-verify 0.9.0
        ("so \\boxed{12}", "\\boxed{12}", 1.0),
        ("so \\boxed{1,200.0}", "the answer is 1200", 1.0),
        ("\\boxed{\\frac{3}{2}}", "1.5", 1.0),
        ("\\boxed{0.5}", "$\\frac12$", 1.0),
        ("\\boxed{x+1}", "$1+x$", 1.0),
        ("\\boxed{2\\sqrt{2}}", "$\\sqrt{8}$", 1.0),
        ("\\boxed{\\text{Friday}}", "\\boxed{\\text{Friday}}", 1.0),
        ("<think>5</think><answer>1/2</answer>", "0.5", 1.0),
        ("<answer>12</answer> not 13", "12", 1.0),
        ("12 or 13", "<answer>13</answer>", 0.0),  # a number that is neither boxed nor LaTeX
        ("\\boxed{\\frac{3}{2}}", "2", 0.0),
        ("<answer></answer> \\boxed{4}", "4", 0.0),
        ("no idea", "12", 0.0),
        ("", "12", 0.0),
        ("\\boxed{12}", "no idea", 0.0),
    ],
)
def test_accuracy_is_what_math_verify_finds(said: str, solution: str, right: float) -> None:
    assert MathAccuracy()([said], solution=[solution]) == [right]


@pytest.mark.slow
def test_accuracy_works_in_another_thread_and_does_not_block_the_event_loop() -> None:
    """A run that `turnwise.api` starts in a notebook is in another thread than the main thread."""

    trajectories = hold_all(Says("so \\boxed{4}"), scheduler, size=2, row=a_row(solution="4"))

    async def scored() -> tuple[list[Any], int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        counting = asyncio.create_task(count())
        values = await Reward("accuracy")(trajectories)
        counting.cancel()
        return values, turns

    with ThreadPoolExecutor(1) as pool:
        MathAccuracy()([""], solution=["1"])
        outcomes.MATH.close()  # so that the call has to wait for a new process
        values, turns = pool.submit(asyncio.run, scored()).result()
    assert values == [1.0, 1.0]
    assert turns > 20


def worker_that(folder: Path, *, on: str, does: str) -> Path:
    """The worker's program with a statement for the completion `on`."""
    program, source = folder / "worker.py", Path(math_worker.__file__).read_text()
    program.write_text(source.replace("    in_tags =", f"    if completion == '{on}':\n        {does}\n    in_tags ="))
    return program


@pytest.mark.slow
def test_a_comparison_that_takes_too_long_ends_the_worker_and_no_other_comparison(tmp_path: Path) -> None:
    process = MathProcess(worker_that(tmp_path, on="hard", does="import time; time.sleep(60)"), limit=60.0)
    assert process.agree("\\boxed{4}", "4") == 1.0
    process.limit = 0.2
    with pytest.raises(RuntimeError, match=r"math-verify took longer than 0\.2 s: the answer is too hard to compare"):
        process.agree("hard", "4")
    process.limit = 60.0
    assert process.agree("\\boxed{4}", "5") == 0.0
    process.close()


def test_a_worker_that_ends_is_started_again_and_its_comparison_fails(tmp_path: Path) -> None:
    program = tmp_path / "worker.py"
    program.write_text(
        "import sys\n"
        "for line in sys.stdin:\n"
        "    if line.startswith('[\"5'):\n"
        "        sys.exit(3)\n"
        "    print('{\"agree\": 1.0}', flush=True)\n"
    )
    process = MathProcess(program)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the process of math-verify ended with exit status 3"):
            process.agree("5", "4")
        assert process.agree("4", "4") == 1.0
    process.close()


def test_an_error_of_math_verify_is_an_error_of_its_comparison(tmp_path: Path) -> None:
    process = MathProcess(worker_that(tmp_path, on="bad", does="raise KeyError('x')"))
    with pytest.raises(RuntimeError, match="math-verify raised KeyError: 'x'"):
        process.agree("bad", "4")
    assert process.agree("\\boxed{4}", "4") == 1.0
    process.close()


def test_formats_are_the_whole_of_a_completion() -> None:
    said = ["<think>a</think>\n<answer>b</answer>", "<think>a</think> b", "c <think>a</think><answer>b</answer>"]
    assert Format()(said) == [1.0, 0.0, 0.0]
    said = ["<think>a</think>\nAction: f\nAction Input: 1", "<think>a</think> Action: f", "Action: f\nAction Input: 1"]
    assert ReActFormat()(said) == [1.0, 0.0, 0.0]


def test_lengths_and_repetitions_are_paid_by_ms_swifts_arguments() -> None:
    args = RewardArgs({"max_completion_length": 100, "soft_cache_length": 20})
    ids = {"response_token_ids": [[[1] * 25, [1] * 25], [[1] * 90], [1] * 120]}

    def right(completions: Any, solution: Any, **kwargs: Any) -> list[float]:
        return [1.0, 1.0, 0.0]

    paid = CosineReward(args, accuracy_orm=right)(["", "", ""], solution=["", "", ""], **ids)
    bend = [(1 + math.cos(math.pi * share)) / 2 for share in (0.5, 0.9, 1.2)]
    assert paid == pytest.approx([0.5 + 0.5 * bend[0], 0.5 + 0.5 * bend[1], -0.5 * bend[2]])
    assert SoftOverlong(args)(["", "", ""], **ids) == [0.0, -0.5, -2.0]
    # of "a b a", "b a b", "a b a": two are different
    assert RepetitionPenalty(args)(["A b a b a", "one two", ""]) == pytest.approx([-1 / 3, 0.0, 0.0])
    with pytest.raises(
        ConfigError, match=r"soft_overlong needs soft_cache_length, below soft_max_length=512; it is None"
    ):
        SoftOverlong(RewardArgs())
    with pytest.raises(AttributeError, match=r"args has no 'beta' here; set it .* arguments: \{args: \{beta: ...\}\}"):
        RewardArgs().beta  # noqa: B018


def thoughtful(*said: str) -> Trajectory:
    from support import byte_tokenizer

    return whole(hold(Says(*said), scheduler, renderer=Renderer(byte_tokenizer(OPENS))))


def test_a_thought_that_the_generation_prompt_opens_belongs_to_the_completion() -> None:
    trajectory = thoughtful("Hm.</think><answer>4</answer>")
    assert trajectory.turns[0].reasoning_opening == "<think>\n"
    completions, columns = arguments_of(trajectory)
    assert completions == ["<think>\nHm.</think><answer>4</answer>"]
    assert columns["messages"][0][-1]["content"] == completions[0]
    assert asyncio.run(Reward("format")([trajectory])) == [1.0]


# how they are asked


@pytest.fixture(autouse=True)
def registries() -> Any:
    before = dict(orms)
    yield
    orms.clear()
    orms.update(before)


class Batch:
    """Remembers what it is asked with."""

    def __init__(self, args: Any, scale: float = 1.0, **kwargs: Any) -> None:
        self.args, self.scale = args, scale
        self.asked: list[tuple[Any, Any]] = []

    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> Any:
        self.asked.append((completions, kwargs))
        return np.array([self.scale * len(one) for one in completions], dtype=np.float32)


def group(*said: str) -> Group:
    from support.conversations import scripted

    row = a_row("Hi", solution="4", source="x")
    engine = scripted(*[[one] for one in said])
    trajectories = hold_all(engine, scheduler, row=row, size=len(said))
    return Group(id="1", row=row, trajectories=trajectories)


def scored(one: Group, *uses: dict[str, Any]) -> list[float | None]:
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "d"},
            "output": "o",
            "train": {"steps": 1},
            "reward": {"group": [{"use": "turnwise.compat.swift:Reward", **use} for use in uses]},
        }
    )
    asyncio.run(scorer(config).score([one]))
    return [trajectory.reward for trajectory in one.trajectories]


def test_a_reward_is_asked_once_about_all_conversations_of_a_row_with_args_and_the_trainers_state() -> None:
    made: list[Batch] = []

    class Kept(Batch):
        def __init__(self, args: Any, **kwargs: Any) -> None:
            super().__init__(args, **kwargs)
            made.append(self)

    orms["batch"] = Kept
    one = group("a", "bb", "ccc")
    assert scored(one, {"arguments": {"use": "batch", "args": {"max_steps": 7}, "arguments": {"scale": 2.0}}}) == [
        2,
        4,
        6,
    ]
    (batch,) = made
    assert (batch.args.max_steps, batch.args.max_completion_length) == (7, 512)
    ((completions, columns),) = batch.asked
    assert sorted(completions) == ["a", "bb", "ccc"]
    assert columns["source"] == ["x", "x", "x"]
    assert [infos["num_turns"] for infos in columns["rollout_infos"]] == [1, 1, 1]
    assert set(columns["trajectory_inputs"]) == {trajectory.id for trajectory in one.trajectories}
    assert (columns["trainer_state"].global_step, columns["trainer_state"].max_steps) == (0, 7)
    assert list(one.trajectories[0].rewards) == ["turns", "batch"]


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, tuple])
def test_arrays_and_tensors_are_rewards_and_nan_is_none(make: Any) -> None:
    def rewards(completions: list[str], **kwargs: Any) -> Any:
        return make([0.5 if one == "a" else math.nan for one in completions])

    orms["odd"] = rewards
    one = group("a", "bb")
    rewards_of = scored(one, {"arguments": {"use": "odd"}})
    by_text = {
        trajectory.assistant_texts[0]: value for trajectory, value in zip(one.trajectories, rewards_of, strict=True)
    }
    assert by_text == {"a": 0.5, "bb": None}  # no reward, which is not the reward 0
    assert ["odd" in trajectory.rewards for trajectory in one.trajectories] == [
        trajectory.assistant_texts == ["a"] for trajectory in one.trajectories
    ]


def test_what_a_reward_class_asks_for_by_name_is_given_and_what_it_lacks_is_reported() -> None:
    class Named:
        def __init__(self, cosine_max_len: int, scale: float) -> None:
            self.made_of = (cosine_max_len, scale)

        def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
            return [self.made_of[0] * self.made_of[1]] * len(completions)

    orms["named"] = Named
    assert scored(group("a", "b"), {"arguments": {"use": "named", "arguments": {"scale": 0.5}}}) == [256.0, 256.0]
    with pytest.raises(
        ConfigError, match=r"named cannot be created: .*missing 1 required positional argument: 'scale'"
    ):
        Reward("named")


def test_a_script_gives_reward_functions_the_arguments_that_they_read(tmp_path: Path) -> None:
    from turnwise.compat.swift.convert import from_swift_arguments

    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from swift.rewards import ORM, orms\nclass Mine(ORM):\n    def __call__(self, completions, trainer_state, **kwargs):\n"
        "        return [self.args.temperature * trainer_state.global_step / trainer_state.max_steps] * len(completions)\n"
        "orms['mine'] = Mine\n"
    )
    found = from_swift_arguments(
        "--rlhf_type grpo --tuner_type full --model M --dataset d.jsonl --max_steps 10 --max_completion_length 64 "
        f"--external_plugins {plugin} --reward_funcs cosine soft_overlong repetition mine accuracy --soft_cache_length 16 "
        "--cosine_max_len 32 --repetition_n_grams 4".split()
    )
    args = [use["arguments"].get("args") for use in found.recipe["reward"]["batch"]]
    assert args[0] == {"max_completion_length": 64, "cosine_max_len": 32}
    assert args[1] == {"max_completion_length": 64, "soft_cache_length": 16}
    assert args[2] == {"repetition_n_grams": 4}
    assert args[3] == {"temperature": 0.9, "max_steps": 10}
    assert found.refused() == []
    (mine,) = [use for use in found.recipe["reward"]["batch"] if use["name"] == "mine"]
    assert scored(group("a", "b"), {"arguments": mine["arguments"]}) == [0.0, 0.0]
    words = "--rlhf_type grpo --model M --dataset d --max_steps 1 --cosine_max_len 9"
    left = from_swift_arguments(words.split()).unsupported
    assert ("cosine_max_len", False) in [(one.key, one.changes_training) for one in left]


def test_in_the_batch_a_reward_is_called_once_with_the_completions_of_all_rows() -> None:
    calls: list[tuple[list[str], Any]] = []

    class Centred:
        def __init__(self, args: Any = None) -> None:
            pass

        def __call__(self, completions: list[str], source: list[str], trajectory_inputs: Any, **kwargs: Any) -> Any:
            calls.append((completions, sorted(trajectory_inputs)))
            lengths = torch.tensor([float(len(one)) for one in completions])
            return lengths - lengths.mean()

    orms["centred"] = Centred
    groups = [group("a", "bb"), group("cccccc")]
    groups[1].trajectories[0].id = "2/0"
    use = {"use": "turnwise.compat.swift:Reward", "arguments": {"use": "centred"}}
    tree = {"model": {"path": "m"}, "data": {"train": "d"}, "train": {"steps": 1}, "reward": {"batch": [use]}}
    asyncio.run(scorer(Config.model_validate(tree)).score(groups))
    assert [[one.reward for one in each.trajectories] for each in groups] == [[-2.0, -1.0], [3.0]]
    assert calls == [(["a", "bb", "cccccc"], ["1/0", "1/1", "2/0"])]


@pytest.mark.parametrize("wrong", [["a"], [1.0, 2.0, 3.0], 1.0, None, np.zeros(3), "ab"])
def test_a_wrong_result_fails_its_conversations_with_the_rule(wrong: Any) -> None:
    def odd(completions: list[str], **kwargs: Any) -> Any:
        return [wrong[0]] * len(completions) if isinstance(wrong, list) and len(wrong) == 1 else wrong

    orms["odd"] = odd
    one = group("a", "bb")
    assert scored(one, {"arguments": {"use": "odd"}}) == [None, None]
    for trajectory in one.trajectories:
        assert trajectory.error is not None
        assert trajectory.error.kind == "reward"
        rule = (
            "it must return a list with one number for each"
            if not isinstance(wrong, list) or len(wrong) > 1
            else "must be a n"
        )
        assert rule in trajectory.error.message


# ms-swift's built-in reward functions, value by value: against its own source where the mirror has it, and literal
# values.


MIRROR = next(
    (
        repo
        for folder in Path(__file__).resolve().parents
        if (repo := folder / ".mirror" / "modelscope+ms-swift" / "repo").is_dir()
    ),
    None,
)

COMPLETIONS = [
    "<think>a</think>\n<answer>12</answer>",
    "<think>a</think><answer>12</answer> and more",
    "\n<think>a</think><answer>12</answer>",
    "<think>a</think>\n\n<answer>1\n2</answer>\n",
    "<think>x</think>\nAction: f\nAction Input: 1",
    "<think>x</think>\nAction: f\nAction Input:",
    "Action: f\nAction Input: 1",
    "so \\boxed{12}",
    "\\boxed{\\frac{1}{2}}",
    "\\boxed{0.5}",
    "12",
    "",
    "A b a b a b",
    "one two",
    "the same the same the same the same",
    "One one ONE one",
]

SOLUTIONS = [
    "12",
    "12",
    "<answer>12</answer>",
    "13",
    "x",
    "x",
    "x",
    "\\boxed{12}",
    "0.5",
    "$\\frac12$",
    "12",
    "12",
    *["1"] * 4,
]

LENGTHS = [0, 1, 5, 50, 90, 99, 100, 101, 150, 200, 255, 256, 300, 511, 512, 600]

ARGS = {
    "max_completion_length": 256,
    "cosine_min_len_value_wrong": -0.7,
    "cosine_max_len_value_wrong": -0.1,
    "cosine_min_len_value_correct": 1.5,
    "cosine_max_len_value_correct": 0.25,
    "cosine_max_len": 200,
    "repetition_n_grams": 2,
    "repetition_max_penalty": -0.5,
    "soft_max_length": 256,
    "soft_cache_length": 64,
}

MATH = [  # what ms-swift's own function returns, with sympy 1.14 and antlr4-python3-runtime 4.11
    ("so \\boxed{12}", "\\boxed{12}", 1.0),
    ("\\boxed{12}", "12", 1.0),
    ("# Answer 7", "# Answer\n7", 1.0),
    ("the answer is 7", "7", 0.0),
    ("\\boxed{\\frac{1}{2}}", "0.5", 0.0),  # the boxed text ends at the first brace
    ("\\boxed{x+1}", "\\boxed{1+x}", 1.0),
    ("\\boxed{x+1}", "\\boxed{x+2}", 0.0),
    ("\\boxed{2\\sqrt{2}}", "\\boxed{\\sqrt{8}}", 0.0),
    ("\\(3\\)", "3", 1.0),
    ("", "3", 0.0),
    ("\\boxed{}", "3", 0.0),
    ("\\boxed{1,000}", "1000", 1.0),
    ("\\boxed{10}", "\\boxed{ 10 }", 1.0),
    ("think # Answer 5 # Answer 6", "5", 1.0),
    ("\\boxed{x^2}", "\\boxed{x\\cdot x}", 1.0),
    ("\\boxed{(x+1)^2}", "\\boxed{x^2+2x+1}", 1.0),
    ("\\boxed{50%}", "0.5", 0.0),
    ("\\boxed{Friday}", "Friday", 1.0),
    ("\\boxed{\\text{no}}", "\\boxed{\\text{yes}}", 0.0),
]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """ms-swift's own module of reward functions, with a stub of the one module that it imports."""
    if MIRROR is None:
        pytest.skip("there is no mirror of ms-swift")
    show = ["git", f"--git-dir={MIRROR}", "show", "HEAD:swift/rewards/orm.py"]
    source = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    stubs = {"swift": ModuleType("swift"), "swift.infer_engine": ModuleType("swift.infer_engine")}
    stubs["swift.infer_engine"].InferRequest = object  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        module = ModuleType("their_orm")
        exec(compile(source, "orm.py", "exec"), vars(module))
    finally:
        for name, known in before.items():
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
    return module.orms  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["accuracy", "format", "react_format", "cosine", "repetition", "soft_overlong"])
def test_a_built_in_reward_gives_the_values_of_ms_swifts_own(name: str, theirs: Any) -> None:
    columns = {"solution": SOLUTIONS, "response_token_ids": [[7] * length for length in LENGTHS]}
    expected = theirs[name](SimpleNamespace(**ARGS))(list(COMPLETIONS), **columns)
    assert orms[name](RewardArgs(ARGS))(list(COMPLETIONS), **columns) == pytest.approx(expected, abs=1e-12)
    assert len(set(expected)) > 1  # the cases tell right from wrong


def test_the_cosine_of_ms_swift_is_written_down() -> None:
    columns = {"solution": SOLUTIONS, "response_token_ids": [[7] * length for length in LENGTHS]}
    ours = orms["cosine"](RewardArgs(ARGS))(list(COMPLETIONS), **columns)
    assert ours[:4] == pytest.approx([1.5, 1.499922895301038, 1.498073333583205, -0.6121320343559642], abs=1e-12)


@pytest.mark.parametrize(("completion", "truth", "right"), MATH)
def test_math_is_what_ms_swifts_own_decides(completion: str, truth: str, right: float) -> None:
    assert orms["math"]()([completion], ground_truths=[truth]) == [right]
    assert orms["math"]()([completion], solution=[truth]) == [right]
    request = SimpleNamespace(messages=[{"role": "assistant", "content": completion}])
    assert orms["math"]()([request, {"messages": request.messages}], ground_truths=[truth] * 2) == [right] * 2


@pytest.mark.parametrize("huge", ["9^9^9^9", "(9^9)^9", "9^{99999999}", "99999!", "3!!!!", "x" * 1_000, "^" * 50_000])
def test_an_expression_that_cannot_be_computed_is_not_equal(huge: str) -> None:
    assert orms["math"]()([f"\\boxed{{{huge}}}"], solution=["1"]) == [0.0]
