"""The number game on TRL's side: a `rollout_func`, which samples with TRL's own generation. TRL's environments are tools, and the
chat template of SmolLM2 writes none."""

from __future__ import annotations

import json
from typing import Any

from number_game import Game


def rollout(prompts: list[list[dict[str, Any]]], trainer: Any) -> dict[str, list[Any] | None]:
    """Play a game for each prompt, all at once. The last message of a prompt has the row, as JSON, in its field `row`."""
    tokenizer = trainer.processing_class
    games = [Game(json.loads(messages[-1]["row"])) for messages in prompts]
    plain = [[{name: message[name] for name in ("role", "content")} for message in messages] for messages in prompts]
    prompt_ids: list[list[int]] = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for messages in plain
    ]
    ids: list[list[int]] = [[] for _ in prompts]
    mask: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    while active:
        sampled, _ = trainer._generate_single_turn([prompt_ids[i] + ids[i] for i in active], None, {}, 1)
        goes_on: list[int] = []
        for i, turn in zip(active, sampled, strict=True):
            ids[i] += turn
            mask[i] += [1] * len(turn)
            if turn[-1] != tokenizer.eos_token_id:  # cut: the game ends with reward 0, as in turnwise
                continue
            said = games[i].answer(tokenizer.decode(turn, skip_special_tokens=True))
            if said is not None:
                bridge = tokenizer.encode(
                    f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
                )
                ids[i] += bridge
                mask[i] += [0] * len(bridge)
                goes_on.append(i)
        active = goes_on
    rewards = [game.reward for game in games]
    # log-probabilities of the rollout: none, as in TRL's own generation without vLLM
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None, "env_mask": mask, "game": rewards}


def reward(completions: list[Any], game: list[float], **_: Any) -> list[float]:
    """The rewards of the games, which `rollout` has computed."""
    return game
