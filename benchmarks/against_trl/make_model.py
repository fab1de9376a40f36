"""Makes the model that both sides start from: `python make_model.py TEMPLATE.jinja OUT`, two minutes on two cores.

A Qwen3 of 0.6 million parameters with a BPE of its own, taught for a few hundred steps to ask a calculator and to repeat its
answer, from traces in which three expressions of ten are copied with a slip. It stands in for a pretrained model where none
can be downloaded: it knows the format, is often wrong, and has room to learn. Writes OUT/model/ and OUT/train.jsonl.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from task import calculator, question
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from turnwise.chat.renderer import Renderer
from turnwise.environments.tools.toolbox import Tool

STEPS, BATCH, PEAK, WARMUP = 330, 32, 2e-3, 20
SLIP = 0.3
ROWS = 2048
TOOLS = [Tool.of(calculator).schema]
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def asked(expression: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is {expression}?"}


def call(expression: str) -> str:
    body = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{body}\n</tool_call>"


def make_tokenizer(template: str, rng: random.Random) -> PreTrainedTokenizerFast:
    """A byte-level BPE learnt from rendered conversations; digits are tokens of their own."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    plain = PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=template)

    def conversation() -> str:
        expression, value = question(rng)
        messages = [
            asked(expression),
            {"role": "assistant", "content": call(expression)},
            {"role": "tool", "name": "calculator", "content": value},
            {"role": "assistant", "content": f"#### {value}"},
        ]
        return plain.apply_chat_template(messages, tools=TOOLS, tokenize=False)

    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((conversation() for _ in range(300)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=template, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def trace(renderer: Renderer, rng: random.Random) -> tuple[list[int], list[bool]]:
    """Tokens of one conversation, cut into pieces as they are at sampling time, and which of them the model says."""
    expression, _ = question(rng)
    written = expression
    if rng.random() < SLIP:
        at = rng.randrange(len(expression))
        written = expression[:at] + rng.choice("0123456789") + expression[at + 1 :]
    value = calculator(written)
    end = renderer.stop_token_ids[0]
    pieces = [
        (renderer.encode_opening([asked(expression)], TOOLS).token_ids, False),
        ([*renderer.encode(call(written)), end], True),
        (renderer.encode_bridge(end, [{"role": "tool", "name": "calculator", "content": value}]).token_ids, False),
        ([*renderer.encode(f"#### {value}"), end], True),
    ]
    ids = [token for piece, _ in pieces for token in piece]
    return ids, [said for piece, said in pieces for _ in piece]


def teach(model: Qwen3ForCausalLM, renderer: Renderer, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.0)
    for step in range(STEPS):
        rows = [trace(renderer, rng) for _ in range(BATCH)]
        longest = max(len(ids) for ids, _ in rows)
        ids_BT = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        said_BT = torch.tensor([said + [False] * (longest - len(said)) for _, said in rows])
        hidden_BTH = model.model(ids_BT).last_hidden_state
        logits_NV = model.lm_head(hidden_BTH[:, :-1][said_BT[:, 1:]])
        loss = torch.nn.functional.cross_entropy(logits_NV, ids_BT[:, 1:][said_BT[:, 1:]])
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"  warm start, step {step:3d} of {STEPS}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    template, out = Path(sys.argv[1]).read_text(), Path(sys.argv[2])
    torch.set_num_threads(min(2, torch.get_num_threads()))
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = make_tokenizer(template, rng)
    model = make_model(tokenizer)
    teach(model, Renderer(tokenizer), rng)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    rows = [
        {"prompt": [asked(expression)], "answer": value} for expression, value in (question(rng) for _ in range(ROWS))
    ]
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
