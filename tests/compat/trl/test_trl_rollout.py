"""TRL's `rollout_func`: it generates the completions itself, and what it returns is compared with what was sampled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.conversations import CUE, Says, a_row, a_table, spoken
from turnwise.compat.trl import TrlReward
from turnwise.compat.trl_rollout import TrlRollout
from turnwise.errors import ConfigError
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Stop, Trajectory

USER = '''
from trl.experimental.openenv import generate_rollout_completions


def echo(prompts, trainer):
    """In the form of TRL's example echo.py."""
    outputs = generate_rollout_completions(trainer, prompts)
    texts = [trainer.processing_class.decode(one["completion_ids"], skip_special_tokens=True) for one in outputs]
    return {
        "prompt_ids": [one["prompt_ids"] for one in outputs],
        "completion_ids": [one["completion_ids"] for one in outputs],
        "logprobs": [one["logprobs"] for one in outputs],
        "env_reward": [len(text) / 10 for text in texts],
    }


def episode(prompts, trainer, added="!", trains_on_added=False):
    """Two turns: the environment's text follows the first one."""
    tokenizer, (messages,) = trainer.processing_class, prompts
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    (first,), (tokens,), (logprobs,), _ = trainer.vllm_generation.generate([ids], None, trainer.num_generations)
    new = tokenizer.encode(added, add_special_tokens=False)
    second = trainer.vllm_client.generate(prompts=[[*ids, *tokens, *new]], max_tokens=2, temperature=trainer.temperature)
    more = second["completion_ids"][0]
    return {
        "prompt_ids": [ids],
        "completion_ids": [[*tokens, *new, *more]],
        "logprobs": [[*logprobs, *[0.0] * len(new), *second["logprobs"][0]]],
        "env_mask": [[*[1] * len(tokens), *[int(trains_on_added)] * len(new), *[1] * len(more)]],
        "won": True,
    }


def reward_from_env(completions, env_reward, **kwargs):
    return [2 * value for value in env_reward]


def of_prompts(prompts):
    return {}


def two(prompts, trainer):
    output = echo(prompts, trainer)
    return {**output, "completion_ids": output["completion_ids"] * 2}


def asks_more(prompts, trainer):
    echo(prompts, trainer)
    return trainer.accelerate_everything
'''


@pytest.fixture
def user(tmp_path: Path) -> str:
    path = tmp_path / "rollouts_of_trl.py"
    path.write_text(USER)
    return str(path)


def held(setup: TrlRollout, *turns: str) -> Trajectory:
    async def run() -> Trajectory:
        context = setup.use_context(a_table(Says(*turns), lambda: setup.make(lambda tools, then: then)))
        group = new_group(a_row(), size=1, seed=0)
        await rollout_groups([group], context)
        return group.trajectories[0]

    return asyncio.run(run())


def test_a_function_of_one_turn_and_its_fields_for_the_reward_function(user: str) -> None:
    trajectory = held(TrlRollout(f"{user}:echo"), "hello")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    assert spoken(trajectory.segments[0]) == [(-1, f"<|im_start|>user\nHi<|im_end|>\n{CUE}"), (0, "hello<|im_end|>")]
    assert trajectory.messages == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello"}]
    assert trajectory.turns[0].info["agent"]["fields"] == {"env_reward": 0.5}
    assert TrlReward(f"{user}:reward_from_env")([trajectory]) == [1.0]


def test_an_episode_of_several_turns_token_for_token(user: str) -> None:
    trajectory = held(TrlRollout(f"{user}:episode"), "hello", "world")
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    assert spoken(trajectory.segments[0])[1:] == [(0, "hello<|im_end|>"), (-1, "!"), (1, "wo")]
    assert trajectory.metrics["agent/unreturned_tokens"] == 0.0
    assert trajectory.turns[1].info["agent"]["fields"] == {"won": True}


def test_tokens_that_the_model_did_not_sample(user: str) -> None:
    refused = held(TrlRollout(f"{user}:episode", arguments={"trains_on_added": True}), "hello", "world")
    assert refused.error is not None
    assert "with the mask 1, and the model did not sample it there" in refused.error.message
    ignored = TrlRollout(f"{user}:episode", arguments={"trains_on_added": True}, returned="ignore")
    trajectory = held(ignored, "hello", "world")
    assert trajectory.error is None
    assert spoken(trajectory.segments[0])[2] == (-1, "!")  # the record says what was sampled


def test_what_has_not_trl_s_form_is_refused(user: str) -> None:
    several = held(TrlRollout(f"{user}:two"), "hello")
    assert several.error is not None
    assert "returned 2 completion_ids for one prompt" in several.error.message
    unknown = held(TrlRollout(f"{user}:asks_more"), "hello")
    assert unknown.error is not None
    assert "trainer.accelerate_everything: turnwise has no trainer of TRL" in unknown.error.message
    for options, told in [
        ({"function": f"{user}:of_prompts"}, "cannot be called with (prompts, trainer"),
        ({"function": f"{user}:echo", "returned": "maybe"}, "returned is compare or ignore"),
    ]:
        with pytest.raises(ConfigError) as caught:
            TrlRollout(**_any(options))
        assert told in str(caught.value)


def _any(options: dict[str, Any]) -> Any:
    return options
