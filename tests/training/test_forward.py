"""Which part of the model the trainer runs: body and head apart only where they are the model, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from support.tiny import tiny_model
from training.test_attention import SIZES, made, plain
from training.test_batch import group
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, _body_and_head
from turnwise.types import Sampling

WITHOUT_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}


def test_a_head_on_a_body_is_run_on_the_targets_only() -> None:
    model = tiny_model()
    assert _body_and_head(model) == (model.model, model.lm_head)
    seen: list[torch.Size] = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.shape))
    (micro,) = pack(group()).micro_batches
    forward = Forward(model, Sampling())
    seen.clear()
    forward.logprobs(micro)
    assert len(micro.targets.token_N) == 13
    assert seen == [(12, 260)]  # two conversations share a sampled token, which is predicted once


@pytest.mark.parametrize(
    "config",
    [
        lambda: hf.GraniteConfig(**WITHOUT_HEAD_DIM, logits_scaling=4.0),
        lambda: hf.Gemma2Config(**SIZES, attn_logit_softcapping=None, final_logit_softcapping=2.0),
        lambda: hf.CohereConfig(**WITHOUT_HEAD_DIM, logit_scale=0.25),
    ],
    ids=["granite", "gemma2", "cohere"],
)
def test_a_model_that_changes_its_heads_logits_is_run_whole(config: Any) -> None:
    model = made(config())
    assert _body_and_head(model) == (None, None)
    one = group()[0]
    (micro,) = pack([one], share_prompts=False).micro_batches
    ids = one.segments[0].token_ids
    expected = [plain(model, ids)[place, ids[place + 1]] for place in (2, 3, 4, 7, 8)]
    torch.testing.assert_close(
        Forward(model, Sampling()).logprobs(micro)[0].detach(), torch.stack(expected), atol=1e-5, rtol=1e-5
    )
