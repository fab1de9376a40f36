"""Makes the model of `against_trl.py --model 135m`: `python make_large.py TINY OUT`, a few seconds.

Random weights in the shape of SmolLM2-135M (30 layers, 576 wide, 9 heads, 3 key-value heads, a vocabulary of 49,152 tokens, tied
weights). The tokenizer is that of the model in TINY, with further tokens up to this vocabulary. The prompts have several
hundred tokens. Writes OUT/model/ and OUT/train.jsonl.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from task import question
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 49_152
ROWS = 64
PROMPT_WORKED_EXAMPLES = 12


def make_tokenizer(tiny: Path, out: Path) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with more tokens: they are never used to encode text, but a model with random weights samples them."""
    AutoTokenizer.from_pretrained(tiny).save_pretrained(out)
    file = out / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    used = {*vocabulary.values(), *(token["id"] for token in content["added_tokens"])}
    for number in range(VOCABULARY):
        if number not in used:
            vocabulary[f"<{number}>"] = number
    file.write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(out)


def prompt(rng: random.Random) -> list[dict[str, str]]:
    """A system prompt that all rows share, worked examples, and a question."""
    examples = [" is ".join(question(rng)) for _ in range(PROMPT_WORKED_EXAMPLES)]
    system = "You are a careful assistant. Work out the value of each expression, one operation after the other. " * 3
    asked = "These are examples: " + "; ".join(examples) + f". What is {question(rng)[0]}?"
    return [{"role": "system", "content": system.strip()}, {"role": "user", "content": asked}]


def main() -> None:
    tiny, out = Path(sys.argv[1]) / "model", Path(sys.argv[2])
    torch.manual_seed(0)
    tokenizer = make_tokenizer(tiny, out / "model")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(out / "model")
    rng = random.Random(0)
    rows = [{"prompt": prompt(rng), "answer": ""} for _ in range(ROWS)]
    (out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
