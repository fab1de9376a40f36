"""Chat templates with one peculiarity each, for what must be found out about them."""

from __future__ import annotations

from support import CHATML

THINKS = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for message in messages %}"
    "{%- set said = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in said and loop.index0 < ns.last %}"
    "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ said }}<|im_end|>\n"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that leaves out what was thought before the last user message, as Qwen3 does."""

GROWS = CHATML.replace(
    "<|im_start|>{{ message.role }}", "<|im_start|>{{ message.role }}{{ ' of many' if messages | length > 4 else '' }}"
)
"""Writes other headers as soon as there are five messages, into what has been said before too."""

NO_TOOLS = (
    "{%- for message in messages %}{% if message.role in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows no tools, and leaves out messages of all roles but three."""

STRANGE_CALLS = (
    CHATML.replace('<tool_call>\n{"name": "', "CALL ")
    .replace('", "arguments": ', " WITH ")
    .replace("}\n</tool_call>", " END")
)
"""Writes tool calls in a format that nobody reads."""

SWITCHES = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and not loop.last %}"
    "{%- set content = content.split('</think>')[-1].lstrip() %}{%- endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
"""ChatML with Qwen3's switch: under `enable_thinking=False` the generation prompt has an empty block of reasoning."""
