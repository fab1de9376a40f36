"""`environment: reasoning_gym:countdown`: a task of Reasoning Gym, with endless rows by seed and its own scorer.

A row is a number in the column `seed`. The entry is made from it when the conversation begins, and scored by the data set's own
`score_answer`. Some scorers evaluate the answer as Python: an answer that could run code, or compute for minutes, is not given to
them; they get a text that is no answer."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.compat.object_factory import number, plain
from turnwise.compat.providers.provider import About, LibraryEnvironments, refuse_unknown_name
from turnwise.data.rows import ProvidedRows, seed_rows
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Opening, Reply, Row, Turn
from turnwise.user_code.threads import run_in_thread

_INSTRUCTION = "Write your final answer between <{tag}> and </{tag}>."
_FEEDBACK = "Your answer is wrong. Try again."
_WITHOUT_ANSWER = "There is no answer between <{tag}> and </{tag}> in your message. Try again."
_LONGEST_ANSWER = 20_000  # characters
_SIZE = 1 << 62
"""The size of most data sets, which compute an entry from its index: any seed is an index."""
_CHUNK = 500
_CHUNKED = frozenset({"acre", "composite", "gsm_symbolic", "list_functions", "word_ladder"})
"""Data sets that make a list of all their entries: chunks of 500 entries, each with a seed of its own, take their place."""


class ReasoningGym(LibraryEnvironments):
    """Makes the environments of a task (an EnvironmentSource with rows).

    Args:
        name: The name of a data set, such as `countdown`; or `composite`, with `datasets` in `config`.
        config: Options of the data set: `{max_numbers: 4}`. For `composite`: `{datasets: [{name: countdown, weight: 1}]}`.
        seed: The seed of the data set. Two runs with the same seed have the same rows.
        level: The level of the data set's curriculum, from 0; a list gives one level after the other to successive rows, in the
            column `level`. `{attribute: level}` sets single attributes. Options in `config` come first.
        tries: The number of answers that the model may give. After a wrong one, it is told so.
        retry_factor: The factor of the reward for each further try.
        right: The reward from which an answer counts as right, and the conversation ends.
        feedback: What the model is told after a wrong answer.
        tag: The answer is the text in the last pair of these tags. Null: it is the whole message.
        instruction: The end of the prompt, with `{tag}` for the tag. The default asks for the tags; an empty text adds nothing.

    Raises ConfigError.
    """

    writes_prompt = True

    def __init__(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        level: int | Sequence[int] | Mapping[str, int] | None = None,
        tries: int = 1,
        retry_factor: float = 1.0,
        right: float = 1.0,
        feedback: str = _FEEDBACK,
        tag: str | None = "answer",
        instruction: str | None = None,
    ) -> None:
        refuse_unknown_name(name, self.names(), provider="reasoning_gym")
        if isinstance(tries, bool) or not isinstance(tries, int) or tries < 1:
            raise ConfigError(f"environment.arguments.tries is {tries!r}; it must be an integer of at least 1")
        changed = {"retry_factor": retry_factor != 1.0, "feedback": feedback != _FEEDBACK}
        if tries == 1 and (idle := next((option for option, set_ in changed.items() if set_), None)):
            raise ConfigError(f"environment.arguments.{idle} has no effect with tries=1: remove it, or raise tries")
        self.name = name
        self.tries, self.retry_factor, self.right, self.feedback, self.tag = tries, retry_factor, right, feedback, tag
        default = "" if tag is None else _INSTRUCTION
        self.instruction = (default if instruction is None else instruction).replace("{tag}", tag or "")
        self._levels = list(level) if isinstance(level, Sequence) and not isinstance(level, str) else None
        if self._levels is not None and not self._levels:
            raise ConfigError("environment.arguments.level is an empty list; give at least one level, such as [0, 1]")
        levels = self._levels if self._levels is not None else [level]
        self._endless = [_Endless(name, dict(config or {}), seed, given) for given in levels]
        self._guards = {
            set_: guard for endless in self._endless for set_, guard in _guards(name, endless.first).items()
        }

    @classmethod
    def names(cls) -> Sequence[str]:
        """The data sets, and `composite`."""
        _library("composite")  # registers the data set
        return sorted(_library("factory").DATASETS)

    def about(self) -> About:
        """What the task brings."""
        levels = "" if self._levels is None else f", with the levels {', '.join(map(str, self._levels))} in turn"
        return About(rows=f"endless, by seed{levels}")

    def rows(self, count: int | None, *, held_out: bool) -> ProvidedRows:
        """Rows of seeds."""
        if self._levels is None:
            return seed_rows(count, held_out=held_out)
        levels = self._levels
        return seed_rows(count, held_out=held_out, columns=lambda seed: {"level": levels[seed % len(levels)]})

    def entry(self, row: Row) -> tuple[Any, Mapping[str, Any]]:
        """The data set of a row, and its entry."""
        seed = row["seed"]
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ValueError(f"row {row.id!r} has seed={seed!r:.80}; it must be an integer of at least 0")
        dataset, index = self._endless[0 if self._levels is None else self._level(row)].at(seed)
        entry = dataset[index]
        if not isinstance(entry, Mapping) or not isinstance(entry.get("question"), str):
            raise TypeError(
                f"{self.name} gave the entry {entry!r:.200}; it must be a dictionary with a text `question`"
            )
        return dataset, entry

    def _level(self, row: Row) -> int:
        assert self._levels is not None
        level = row["level"]
        if level not in self._levels:
            raise ValueError(f"row {row.id!r} has level={level!r:.80}; environment.arguments.level has {self._levels}")
        return self._levels.index(level)

    def answer(self, text: str) -> str | None:
        """The answer in a message of the model; None if there is none."""
        if self.tag is None:
            return text.strip()
        return _library("utils").extract_answer(text, tag_name=re.escape(self.tag))

    def score(self, dataset: Any, entry: Mapping[str, Any], answer: str | None) -> tuple[float, str | None]:
        """The reward of an answer; and why the scorer got another text in its place, or None."""
        # a composite set names the set that an entry is from, and scores it by that name
        guard = self._guards.get(entry["metadata"]["source_dataset"] if self.name == "composite" else self.name)
        refused = None if answer is None or guard is None else guard(answer)
        given = answer if refused is None else _UNUSABLE
        return number(dataset.score_answer(answer=given, entry=entry), f"{self.name}.score_answer"), refused

    def __call__(self) -> Environment:
        return _Task(self)


class _Task:
    """One conversation about one entry."""

    def __init__(self, source: ReasoningGym) -> None:
        self._source = source
        self._tried = 0

    async def begin(self, row: Row) -> Opening:
        self._dataset, self._entry = await self._aside(functools.partial(self._source.entry, row))
        question = self._entry["question"]
        if self._source.instruction:
            question = f"{question}\n\n{self._source.instruction}"
        *before, last = row.messages
        text = f"{last['content']}\n\n{question}" if last["content"] else question
        return Opening(messages=[*before, {**last, "content": text}])

    async def step(self, turn: Turn) -> Reply:
        source = self._source
        answer = source.answer(str(turn.message.get("content") or ""))
        score, refused = await self._aside(functools.partial(source.score, self._dataset, self._entry, answer))
        reward = score * source.retry_factor**self._tried
        self._tried += 1
        info = {"answer": answer, "expected": plain(self._entry.get("answer")), "score": score}
        info |= {} if refused is None else {"not_evaluated": refused}
        if score >= source.right or self._tried >= source.tries:
            return Reply(reward=reward, done=True, info=info)
        told = _WITHOUT_ANSWER.replace("{tag}", source.tag or "") if answer is None else source.feedback
        # the last answer counts: a wrong one that is followed by another has no reward
        return Reply(messages=[{"role": "user", "content": told}], info=info)

    async def close(self) -> None:
        pass

    async def _aside(self, function: Callable[[], Any]) -> Any:
        return await run_in_thread(function, name=f"reasoning_gym:{self._source.name}", kind="environment")


def _library(module: str) -> Any:
    """A module of the library, which need not be installed where types are checked."""
    return importlib.import_module(f"reasoning_gym.{module}")


class _Endless:
    """A data set without an end. Raises ConfigError if it cannot be created."""

    def __init__(self, name: str, config: dict[str, Any], seed: int, level: Any) -> None:
        chunked = name in _CHUNKED
        self._size = _CHUNK if chunked else _SIZE
        make = functools.partial(_dataset, name, config, level, self._size)
        self._chunk: Callable[[int], Any] = functools.lru_cache(maxsize=16)(lambda chunk: make(seed + chunk * _CHUNK))
        self.first = self._chunk(0)

    def at(self, number_: int) -> tuple[Any, int]:
        """The data set with the entry of this number, and its index in it."""
        chunk, index = divmod(number_, self._size)
        return self._chunk(chunk), index


def _dataset(name: str, config: Mapping[str, Any], level: Any, size: int, seed: int) -> Any:
    """A data set of the library. Raises ConfigError with the library's own message."""
    if reserved := next((option for option in ("seed", "size") if option in config), None):
        raise ConfigError(
            f"environment.arguments.config.{reserved}: remove it; the rows are endless, and their seed is "
            f"environment.arguments.seed"
        )
    config = dict(config)
    try:
        with boundary("environment"):
            if level is not None:
                config = {**_of_level(name, level), **config}
            if name == "composite":
                specs = [{"weight": 1.0, "config": {}, **dict(spec)} for spec in config.pop("datasets", ())]
                config["datasets"] = [_library("composite").DatasetSpec(**spec) for spec in specs]
            return _library("factory").create_dataset(name, seed=seed, size=size, **config)
    except Failed as failed:
        if isinstance(failed.__cause__, ConfigError):
            raise failed.__cause__ from None
        raise ConfigError(
            f"environment: reasoning_gym:{name} cannot be created with config={config!r:.200}: {failed.failure.message}"
        ) from None


def _of_level(name: str, level: Any) -> dict[str, Any]:
    """The options that the curriculum of a data set has at a level. Raises ConfigError."""
    factory = _library("factory")
    if not factory.has_curriculum(name):
        raise ConfigError(f"environment.arguments.level: {name} has no curriculum: remove it, and use config")
    curriculum = factory.create_curriculum(name)
    levels = level if isinstance(level, Mapping) else dict.fromkeys(curriculum.attributes, level)
    for attribute, number_ in levels.items():
        if attribute not in curriculum.attributes:
            raise ConfigError(
                f"environment.arguments.level: the curriculum of {name} has no attribute {attribute!r}"
                f"{nearest(attribute, curriculum.attributes)}; it has {', '.join(curriculum.attributes)}"
            )
        if isinstance(number_, bool) or not isinstance(number_, int) or number_ < 0:
            raise ConfigError(f"environment.arguments.level has {number_!r}; a level is an integer of at least 0")
        most = len(curriculum.attributes[attribute].levels) - 1
        if number_ > most and isinstance(level, Mapping):
            raise ConfigError(f"environment.arguments.level: {attribute} has the levels 0 to {most}, and not {number_}")
        curriculum.set_attr_level(attribute, min(number_, most))
    configured = vars(curriculum.generate_configuration({}))
    options = inspect.signature(type(curriculum.generate_configuration({}))).parameters
    return {
        option: value for option, value in configured.items() if option in options and option not in ("seed", "size")
    }


# scorers that evaluate answers

_Guard = Callable[[str], str | None]
"""Why an answer must not be given to the scorer, or None."""

_CONSTANTS = frozenset({"C", "E", "I", "pi"})
_EXPONENTIAL = frozenset({"exp", "sinh", "cosh"})
_FUNCTIONS = _EXPONENTIAL | {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "tanh", "log", "ln", "sqrt", "Abs"),
}
_MOST_BITS = 4096.0
"""The largest number that an answer may have as an intermediate result."""
_MOST_DEGREE = 40.0
"""The largest degree of an answer that the scorer simplifies, over one denominator."""
_MOST_TERMS = 1000
"""The most terms that a simplifier may find when it expands an answer."""
_UNUSABLE = "?"
"""What a scorer gets in place of an answer that must not be evaluated: no Python."""
_LITERAL = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.USub, ast.UAdd, ast.Load,
)  # fmt: skip
_CHARACTERS = re.compile(r"[0-9A-Za-z.+\-*/%^()\s]*", re.ASCII)
"""What arithmetic consists of. Without quotes, brackets, underscores, `!`, `#` and `,`, sympy reads the same tokens as Python."""
_LARGE_EXPONENT = re.compile(r"[eE][+-]?\d{3}")
_TOO_LARGE = "it is too large to compute"


def _literal(answer: str) -> str | None:
    """For scorers that call `eval`: lists, texts and numbers only."""
    if len(answer) > _LONGEST_ANSWER:
        return f"it has more than {_LONGEST_ANSWER} characters"
    try:
        body = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None  # `eval` raises this too: the scorer compares the text
    except (MemoryError, RecursionError):
        return "it is nested too deeply"
    if isinstance(body, ast.Name) and re.fullmatch("[A-Z]+", answer.strip()):
        return None  # a text of letters; other names could be those of the scorer, such as `oracle_answer`
    if all(isinstance(node, _LITERAL) for node in ast.walk(body)):
        return None
    return "it is not a list of numbers or texts"


def _fraction(answer: str) -> str | None:
    """For a scorer that calls `Fraction`, which computes all digits of 1e999999999."""
    return _TOO_LARGE if _LARGE_EXPONENT.search(answer.replace("_", "")) else None


def _arithmetic(answer: str) -> str | None:
    """For scorers that call sympy's `parse_expr`, which evaluates its text as Python: numbers."""
    return _evaluable(answer, longest=1000)


def _polynomial(answer: str) -> str | None:
    """The same: numbers and variables of one letter. The scorer does not expand powers."""
    return _evaluable(answer, longest=_LONGEST_ANSWER, variables=True)


def _integral(answer: str) -> str | None:
    """The same: functions too. The scorer differentiates and simplifies."""
    refused = _evaluable(answer, longest=1000, variables=True, functions=_FUNCTIONS)
    if refused is not None:
        return refused
    body = ast.parse(answer.strip(), mode="eval").body
    # a polynomial of this degree in the variables and in each sin(x), exp(x), ... has this many terms
    unknowns = {ast.unparse(node) for node in ast.walk(body) if isinstance(node, ast.Name | ast.Call)}
    degree = sum(_degree(body))
    if not degree <= _MOST_DEGREE:
        return _TOO_LARGE
    unknowns -= _CONSTANTS | _FUNCTIONS
    return _TOO_LARGE if math.comb(math.ceil(degree) + len(unknowns), len(unknowns)) > _MOST_TERMS else None


def _evaluable(
    answer: str, *, longest: int, variables: bool = False, functions: frozenset[str] = frozenset()
) -> str | None:
    text = answer.strip()
    if len(text) > longest:
        return f"it has more than {longest} characters"
    if not _CHARACTERS.fullmatch(text):
        return "it is not an arithmetic expression"
    if _LARGE_EXPONENT.search(text):
        return _TOO_LARGE
    try:
        bits = _bits(ast.parse(text, mode="eval").body, variables=variables, functions=functions)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, OverflowError):
        return "it is not an arithmetic expression"
    return _TOO_LARGE if bits > _MOST_BITS else None


def _bits(node: ast.expr, *, variables: bool, functions: frozenset[str]) -> float:
    """A bound of the bits of an expression's value: of its numerator and its denominator. Raises ValueError for what is not
    arithmetic, and OverflowError for what is too large in between.

    A variable counts as 1: it may vanish, as in exp(exp(exp(9 + 0*x))).
    """
    bits = functools.partial(_bits, variables=variables, functions=functions)
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return float(value.bit_length())
        case ast.Constant(value=float()):  # the decimal digits: a simplifier takes them for a fraction
            assert node.end_col_offset is not None
            written = ast.unparse(node)
            return 3.4 * (node.end_col_offset - node.col_offset) + 350.0 * ("e" in written)
        case ast.Name(id=name) if variables and (name in _CONSTANTS or (len(name) == 1 and name.isascii())):
            return 2.0 if name in _CONSTANTS else 1.0
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return bits(operand)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in functions:
            inner = bits(argument)
            return 1.5 * 2.0 ** min(inner, 64.0) if name in _EXPONENTIAL else 16.0 + inner
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as exponent)):
            return max(bits(left), 1.0) * float(exponent)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return max(bits(left), 1.0) * 2.0 ** min(bits(right), 64.0)
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod(), right=right):
            return bits(left) + bits(right)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.BitXor(), right=right):
            return max(bits(left), bits(right)) + 1.0
    raise ValueError


def _degree(node: ast.expr) -> tuple[float, float]:
    """A bound of the degrees of the numerator and the denominator in the variables and functions, over one denominator."""
    match node:
        case ast.Name(id=name):
            return (0.0 if name in _CONSTANTS else 1.0), 0.0
        case ast.UnaryOp(operand=operand):
            return _degree(operand)
        case ast.Call(args=[argument]):
            return 1.0 + sum(_degree(argument)), 0.0
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            up, down = _degree(left)
            if sum(_degree(right)):
                return 1.0 + up + down + sum(_degree(right)), 0.0
            if up + down == 0:
                return 0.0, 0.0
            factor = _magnitude(right)
            negative = isinstance(right, ast.UnaryOp) and isinstance(right.op, ast.USub)
            return (down * factor, up * factor) if negative else (up * factor, down * factor)
        case ast.BinOp(left=left, op=op, right=right):
            (up, down), (other_up, other_down) = _degree(left), _degree(right)
            if isinstance(op, ast.Mult):
                return up + other_up, down + other_down
            if isinstance(op, ast.Add | ast.Sub):
                return max(up + other_down, other_up + down), down + other_down
            return up + other_down, down + other_up
    return 0.0, 0.0


def _magnitude(exponent: ast.expr) -> float:
    """The absolute value of a number or of a fraction of numbers; infinity for others."""
    match exponent:
        case ast.Constant(value=int() | float() as value):
            return abs(float(value))
        case ast.UnaryOp(operand=operand):
            return _magnitude(operand)
        case ast.BinOp(left=left, op=ast.Div(), right=ast.Constant(value=int() as below)) if below != 0:
            return _magnitude(left) / below
    return math.inf


_EVALUATES: Mapping[str, _Guard] = {
    "binary_matrix": _literal,
    "coin_flip": _fraction,
    "countdown": _arithmetic,
    "intermediate_integration": _integral,
    "n_queens": _literal,
    "polynomial_multiplication": _polynomial,
    "puzzle24": _arithmetic,
    "simple_integration": _integral,
    "spiral_matrix": _literal,
    "string_insertion": _literal,
}
"""The data sets whose scorers evaluate the answer, and what may be given to them."""

_CALLS = re.compile(r"\b(?:eval|exec|parse_expr|sympify|Fraction)\(\s*(?!entry\b)")
_HARMLESS = frozenset({"propositional_logic"})
"""Its `parse_expr` is a parser of its own."""


def _guards(name: str, dataset: Any) -> dict[str, _Guard]:
    """The guards of a data set, or of those in a composite set, by the name of the set.

    Raises ConfigError for a scorer that evaluates answers and is not known.
    """
    if name == "composite":
        inner = [_guards(other, inner) for other, inner in dataset.datasets.items()]
        return {set_: guard for guards in inner for set_, guard in guards.items()}
    if name in _EVALUATES:
        return {name: _EVALUATES[name]}
    if name not in _HARMLESS and _CALLS.search(inspect.getsource(type(dataset).score_answer)):
        raise ConfigError(
            f"environment: the scorer of reasoning_gym:{name} evaluates the model's answer as Python, in the process of the "
            f"training. This version of turnwise does not know which answers are harmless: use another data set"
        )
    return {}
