"""Chat templates of real models, each with a byte-level BPE that carries its family's special tokens."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from turnwise.chat.renderer import Renderer

SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "templates"

_SPECIAL = re.compile(
    r"<\|[A-Za-z_\"]+\|>|<｜[^｜<>]+｜>|<\|[A-Za-z_]+>|<[A-Za-z_]+\|>|<(?:start|end)_of_(?:turn|image)>|<end_of_utterance>|\[gMASK\]|<sop>|</?s>|"
    r"</?think>|</?tool_call>|</?tool_response>"
)
# as Llama 3 and Qwen cut: line ends stay together, so a cue that ends in them is cut alike whatever follows
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDS = {
    # the stop tokens that the models' own generation configs name, where the template alone does not tell them
    "gptoss": ["<|return|>", "<|call|>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
}
_EOS = (
    "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|return|>",
    "<end_of_utterance>", "<|end|>", "<|eot|>", "</s>", "<|endoftext|>",
)  # fmt: skip
_TEXT = [
    "system-words question-words words-0 argument-0-0 result-0-0 once-more probe_tool A tool. A text.",
    '{"name": "probe_tool", "arguments": {"text": "argument-1-0"}} assistant user system tool\n\n',
]


def template_files() -> list[Path]:
    """The templates that are there: those that the wheel of trl ships, and what else there is in ../shared."""
    found: list[Path] = []
    spec = importlib.util.find_spec("trl")  # found, never imported
    if spec is not None and spec.origin is not None:
        found += sorted((Path(spec.origin).parent / "chat_templates").glob("*.jinja"))
    have = {path.read_text(encoding="utf-8") for path in found}
    if SHARED.is_dir():
        found += [path for path in sorted(SHARED.glob("*.jinja")) if path.read_text(encoding="utf-8") not in have]
    return found


@cache
def family_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE with some merges and the special tokens that the template names."""
    source = path.read_text(encoding="utf-8")
    special = sorted(set(_SPECIAL.findall(source)) | {"<|endoftext|>", "<|begin_of_text|>"})
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + 200,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([*_TEXT, _SPECIAL.sub(" ", source)], trainer)
    core.add_special_tokens([AddedToken(token, special=True) for token in special])
    eos = _eos(path, source)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=eos, bos_token="<|begin_of_text|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = source
    return tokenizer


def _eos(path: Path, source: str) -> str:
    if path.stem.startswith("phi3"):
        return "<|endoftext|>"
    return next((token for token in _EOS if token in source), "<|endoftext|>")


@cache
def family_renderer(path: Path) -> Renderer:
    """The renderer of a template."""
    tokenizer = family_tokenizer(path)
    ends = next((ends for name, ends in _ENDS.items() if path.stem.startswith(name)), [])
    stops = [tokenizer.convert_tokens_to_ids(end) for end in ends]
    # some (DeepSeek) write calls and show no tools
    return Renderer(tokenizer, generation_stop_ids=stops, unchecked=["tools shown"])
