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

_CALLS_JSON = (
    "{%- for call in message.tool_calls %}"
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", '
    '"parameters": {{ call.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{%- endfor %}"
)
MARKED_ANSWERS = (
    "{%- if tools %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|END_OF_TURN_TOKEN|>{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
    "{%- if message.reasoning_content %}<|START_THINKING|>{{ message.reasoning_content }}<|END_THINKING|>{% endif %}"
    "{%- if message.content %}<|START_TEXT|>{{ message.content }}<|END_TEXT|>{% endif %}"
    "{%- if message.tool_calls %}<|START_ACTION|>[" + _CALLS_JSON + "]<|END_ACTION|>{% endif %}<|END_OF_TURN_TOKEN|>"
    "{%- else %}<|START_OF_TURN_TOKEN|><|{{ message.role | upper }}_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>{% endif %}"
)
"""In the manner of Cohere 2 MoE: answers have marks, and reasoning is followed by the mark of an answer or by that of a call."""

CLOSES_NO_REASONING = (
    "{%- if tools %}]~b]system\n<tools>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}</tools>[e~[\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}]~b]ai\n"
    "{% if message.reasoning_content %}<mm:think>{{ message.reasoning_content }}{% endif %}</mm:think>{{ message.content or '' }}"
    "{%- if message.tool_calls %}<mm:tool_call>{%- for call in message.tool_calls %}"
    '<invoke name="{{ call.function.name }}">{% for key, value in call.function.arguments.items() %}'
    '<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>{% endfor %}</invoke>'
    "{%- endfor %}</mm:tool_call>{% endif %}[e~[\n"
    "{% else %}]~b]{{ message.role }}\n{{ message.content }}[e~[\n{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}]~b]ai\n{% endif %}"
)
"""In the manner of MiniMax M3: a turn without reasoning begins with the closing mark of reasoning."""

WORDS_INSIDE_MARKS = (
    "{%- if tools %}<|header_start|>system<|header_end|>\n\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|eot|>{% endif %}"
    "{%- for message in messages %}<|header_start|>{{ message.role }}<|header_end|>\n\n"
    "{% if message.tool_calls %}<|python_start|>{{ message.content or '' }}<|python_end|>"
    "{%- for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    "{%- else %}{{ message.content }}{% endif %}<|eot|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n{% endif %}"
)
"""In the manner of Llama 4: the words beside a call stand between the two marks in front of it."""

CHANNEL_NAMES = (
    "{%- if tools %}<|header_start|>system<|header_end|>\n\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|eot|>{% endif %}"
    "{%- for message in messages %}<|header_start|>{{ message.role }}<|header_end|>\n\n"
    "{% if message.role == 'assistant' %}{% if message.content %}>>>all\n{{ message.content }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}>>>{{ call.function.name }}\n{{ call.function.arguments | tojson }}{% endfor %}"
    "{%- else %}{{ message.content }}{% endif %}<|eot|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n\n>>>{% endif %}"
)
"""In the manner of functionary 3.2: the generation prompt opens the channel whose name a call or an answer begins with."""

TWO_ENDS = (
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{%- if message.role == 'assistant' %}<|endoftext|>{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Writes two marks at the end of a turn, of which the tokenizer names the second as its stop token."""

CHANNELS = (
    "{%- for message in messages %}<|open|>message role={{ message.role }}<|sep|>"
    "{%- if message.role == 'assistant' %}<|open|>think<|sep|>{{ message.reasoning_content or '' }}<|close|>think<|sep|>"
    "<|open|>response<|sep|>{{ message.content }}<|close|>response<|sep|>{% else %}{{ message.content }}{% endif %}"
    "<|close|>message<|sep|><|end_of_msg|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|open|>message role=assistant<|sep|><|open|>think<|sep|>{% endif %}"
)
"""In the manner of Kimi K3: reasoning and answer are channels, with the same special tokens around their names."""

CALLS_FIRST = (
    '{%- macro written(value) %}{% if value is string %}<|"|>{{ value }}<|"|>'
    "{% elif value is mapping %}{{ '{' }}{% for key, item in value.items() %}{{ key }}:{{ written(item) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif value is sequence %}[{% for item in value %}{{ written(item) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
    "{%- if tools %}<|turn>system\n{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}<turn|>\n{% endif %}"
    "{%- for message in messages %}{%- if message.role != 'tool' %}"
    "{%- set continues = loop.index0 and messages[loop.index0 - 1].role == 'tool' %}"
    "{%- if not continues %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}\n{% endif %}"
    "{%- set answers = namespace(count=0) %}"
    "{%- if message.tool_calls %}{%- for call in message.tool_calls %}<|tool_call>call:{{ call.function.name }}"
    "{{ written(call.function.arguments) }}<tool_call|>{% endfor %}"
    "{%- for later in messages[loop.index:] %}{%- if later.role == 'tool' and answers.count == loop.index0 %}"
    "{%- set answers.count = answers.count + 1 %}"
    "<|tool_response>response:{{ later.name }}{{ '{' }}value:<|\"|>{{ later.content }}<|\"|>}<tool_response|>{% endif %}"
    "{% endfor %}"
    "{%- endif %}{{ message.content or '' }}"
    "{%- if message.tool_calls and not answers.count %}<|tool_response>"
    "{%- elif message.content or not answers.count %}<turn|>\n{% endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
"""In the manner of Gemma 4: a turn is built from its fields, first the calls, then the answers of tools, then the words."""

SHOWS_NO_TOOLS = (
    "{%- for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Plain ChatML, as SmolLM2 has it: messages of all roles, no tools and no calls."""

GRANITE_4 = (
    "{%- set shown = namespace(text='') %}"
    "{%- if tools %}{%- set shown.text = 'You may call these tools:\\n<tools>' %}"
    "{%- for tool in tools %}{%- set shown.text = shown.text + '\\n' + (tool | tojson) %}{%- endfor %}"
    "{%- set shown.text = shown.text + '\\n</tools>' %}{%- endif %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set shown.text = messages[0].content + ('\\n\\n' + shown.text if tools else '') %}{%- endif %}"
    "{%- if shown.text %}{{ '<|start_of_role|>system<|end_of_role|>' + shown.text + '<|end_of_text|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or message.role == 'system' and not loop.first %}"
    "{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' + (message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}{{ '\\n' if message.content or not loop.first }}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{%- endfor %}{{ '<|end_of_text|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|start_of_role|>user<|end_of_role|>' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end_of_text|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"
)
"""In the manner of Granite 4: hermes calls and answers between marks of roles; no line end after the mark of a role."""

KIMI_K2_5 = (
    "{%- set seen = namespace(answer=-1) %}"
    "{%- for message in messages %}{%- if message.role == 'assistant' and not message.tool_calls %}"
    "{%- set seen.answer = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools_ts_str or tools | tojson }}<|im_end|>{%- endif %}"
    "{%- for message in messages %}{%- set name = message.name or message.role %}"
    "{%- if message.role == 'user' %}<|im_user|>{{ name }}<|im_middle|>"
    "{%- elif message.role == 'assistant' %}<|im_assistant|>{{ name }}<|im_middle|>"
    "{%- else %}<|im_system|>{{ name }}<|im_middle|>{%- endif %}"
    "{%- if message.role == 'assistant' %}"
    "<think>{{ message.reasoning_content or '' if loop.index0 > seen.answer and thinking is not false }}</think>"
    "{{ message.content or '' }}"
    "{%- if message.tool_calls %}<|tool_calls_section_begin|>{%- for call in message.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "<|tool_call_end|>{%- endfor %}<|tool_calls_section_end|>{%- endif %}"
    "{%- elif message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n{{ message.content }}"
    "{%- else %}{{ message.content }}{%- endif %}<|im_end|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>"
    "{{ '<think></think>' if thinking is false else '<think>' }}{%- endif %}"
)
"""In the manner of Kimi K2.5: the header of an answer names the tool, reasoning stays until the next answer without calls."""
