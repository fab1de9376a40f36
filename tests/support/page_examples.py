"""The fenced code blocks of the written pages, and the directory in which the blocks of a page run.

What the tests change in an example is listed here: `REPLACEMENTS` in Python and shell blocks and in files that a page shows, and
`FILES` that a page names but does not show. Nothing else is changed, except that commands which train get options for a short run
(`SMALL` in test_code_blocks.py). A block that cannot run here has a comment `<!-- not run: REASON -->` before it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

__all__ = [
    "FILES",
    "REPLACEMENTS",
    "ROOT",
    "SHOWN",
    "VARIABLES",
    "Block",
    "all_blocks",
    "commands",
    "prepare",
    "replaced",
]

ROOT = Path(__file__).parents[2]

REPLACEMENTS = {
    r"Qwen/Qwen[\w.-]+": "demo/model",
    r'"steps": \d+': '"steps": 1',
    r'"batch_size": \d+': '"batch_size": 2',
    r'"group_size": \d+': '"group_size": 2',
    r"train\.steps=\d+": "train.steps=1",
    r'\["train\.steps=1"\]': '["train.steps=1", "train.batch_size=2", "train.group_size=2", "eval.max_rows=2"]',
    r"(?<=turnwise sft )RECIPE": "recipes/sft.yaml",
    r"\bRECIPE\b|\bFILE\b": "recipes/calculator.yaml",
    r"\bMODEL\b": "demo/model",
    r"\bRUN\b": "runs/demo",
    r" \[[\w= .]+\]| key=value| \.\.\.(?=$|\s)": "",
}
"""Regular expression -> text. Models of the hub become the model of the repository, and trainings become short. In synopses of
commands, placeholders become files, and parts in brackets are left out."""

VARIABLES = ("USER_MODEL_KEY", "REWARD_TOKEN", "JUDGE_KEY", "OPENAI_API_KEY", "VLLM_TOKEN")
"""Environment variables that examples name. The tests set them; no example sends them anywhere."""

_FUNCTION = """
def {}(completion):
    return 0.0
"""
_SEARCH = '''
def search(query: str) -> str:
    """Search.

    Args:
        query: What to look for.
    """
    return query
'''
_INTERACTION = """
interaction:
  - {name: gsm8k, class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}
"""
_VERL_TOOL = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: The reward of an answer.
        parameters: {type: object, properties: {answer: {type: string, description: The answer.}}, required: [answer]}
"""
_AGENTS = """
- {name: my_agent, _target_: my_agent_loops.MyAgent}
"""
_AGENT_LOOPS = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

class MyAgent(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        output = await self.server_manager.generate("1", prompt_ids=ids, sampling_params=sampling_params)
        mask = [1] * len(output.token_ids)
        return AgentLoopOutput(prompt_ids=ids, response_ids=output.token_ids, response_mask=mask, metrics={})
"""
_ROLLOUT_FUNC = """
def rollout_func(prompts, trainer):
    return trainer.vllm_generation.generate(prompts)
"""
FILES: dict[str, dict[str, str]] = {
    "*": {
        "recipe.yaml": (ROOT / "recipes" / "calculator.yaml").read_text(encoding="utf-8"),
        "lines.jsonl": '["#### 1", "#### 2"]\n["#### 3", "#### 4"]\n',
    },
    "README.md": {"guess.jsonl": '{"prompt": "Guess a number from 1 to 9.", "secret": 7}\n' * 2},
    "docs/recipes.md": {
        "my_tools.py": _SEARCH,
        "my_rewards.py": _FUNCTION.format("brevity")
        + "def politeness(turn):\n    return 0.0\n"
        + "class Judge:\n    def __init__(self, model):\n        pass\n    def __call__(self, completions):\n        return []\n",
    },
    "docs/trl.md": {"rollouts.py": _ROLLOUT_FUNC},
    "docs/verl.md": {
        "interaction_config.yaml": _INTERACTION,
        "tool_config.yaml": _VERL_TOOL,
        "agents.yaml": _AGENTS,
        "my_agent_loops.py": _AGENT_LOOPS,
    },
}
"""Page (`*`: all pages) -> files that its examples use, and that the page does not show: name -> content."""
SHOWN = {
    "docs/environments.md": {"market.jsonl": "json"},
    "docs/sft.md": {"conversations.jsonl": "json"},
    "docs/tools.md": {"mcp.json": "json"},
}
"""Page -> files that the page shows without their name: name -> language of the block."""

_BLOCK = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>.*?) -->\n\s*)?^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    not_run: str | None
    """The reason why the block cannot run here."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The name in the first line, if the block is the content of a file: `# guess.py`."""
        first = re.match(r"# ([\w/]+\.\w+)\n", self.text)
        return first[1] if first else None


def pages() -> list[str]:
    """All pages with examples, as paths in the repository."""
    found = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "recipes").glob("*.md"),
        ROOT / "benchmarks/README.md",
    ]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def blocks(page: str) -> Iterator[Block]:
    """The blocks of a page, in its order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        lines = "".join(line[indent:] if line.strip() else line for line in match["text"].splitlines(keepends=True))
        line = text.count("\n", 0, match.start("language")) + 1
        yield Block(page, line, match["language"].strip(), lines, match["reason"])


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    return [block for page in pages() for block in blocks(page)]


def first(page: str, language: str) -> str:
    """The text of a page's first block of a language."""
    return next(block.text for block in blocks(page) if block.language == language)


def replaced(text: str) -> str:
    """An example with all replacements."""
    for pattern, new in REPLACEMENTS.items():
        text = re.sub(pattern, new, text)
    return text


def prepare(directory: Path, page: str) -> None:
    """Write the files that the examples of a page use: those that the page shows, and `FILES`."""
    for name in ("demo", "recipes", "benchmarks"):
        (directory / name).symlink_to(ROOT / name)
    files = FILES["*"] | FILES.get(page, {})
    files |= {name: first(page, language) for name, language in SHOWN.get(page, {}).items()}
    files |= {block.file: replaced(block.text) for block in blocks(page) if block.file}
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    Image.new("RGB", (64, 64)).save(directory / "a.png")


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words, without comments, `for` lines and variables in front of a command."""
    joined = text.replace("\\\n", " ")
    found: list[list[str]] = []
    for line in joined.splitlines():
        for part in re.split(r" && |; (?=do\b)", line):
            words = shlex.split(part, comments=True)
            while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("do", "nice")):
                words = words[1:]
            if words and words[0] not in ("for", "done"):
                found.append(words)
    return found
