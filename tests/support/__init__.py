"""What the tests build for themselves: a byte-level tokenizer, a tiny model, rows. No files, no network."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{%- if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not loop.first or message.content %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A strictly append-only template with hermes tool calls, in the manner of Qwen."""


def byte_tokenizer(
    template: str | None = CHATML,
    *,
    special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos: str = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """One token a byte, and special tokens, of ChatML if no others are given: token lists that can be checked by eye."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


_MARK = re.compile(r"<\|[A-Za-z_\"]+\|>|<\|[A-Za-z_]+>|<[A-Za-z_]+\|>|\[e~\[|\]~b\]")


def marked_tokenizer(template: str, *, eos: str) -> PreTrainedTokenizerFast:
    """`byte_tokenizer` with all marks of a template as special tokens."""
    special = dict.fromkeys(["<|endoftext|>", eos, *_MARK.findall(template)])
    return byte_tokenizer(template, special=list(special), eos=eos)


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that would write `ab` as one token (259), where the model may have said `a`, `b`."""
    tokenizer = byte_tokenizer()
    core = tokenizer.backend_tokenizer
    vocabulary = {**tokenizer.get_vocab(), "ab": 259}
    core.model = models.BPE(vocab=vocabulary, merges=[("a", "b")])
    return tokenizer
