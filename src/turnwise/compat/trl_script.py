"""Reads what a training script gives to a configuration and a trainer of TRL, without running the script.

Knows Python's syntax. Does not know what an argument becomes: `trl_convert.py` does."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError, text_of
from turnwise.json_yaml import read_text

__all__ = ["TrainingScript", "definitions", "read_script"]

_TRAINERS: Mapping[str, str] = {
    "GRPOConfig": "grpo",
    "DistillationConfig": "distillation",
    "ServerDistillationConfig": "server_distillation",
    "GKDConfig": "gkd",
}
_LORA: Mapping[str, str] = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Arguments of peft's LoraConfig, and TRL's names for them."""
_LORA_WITHOUT_EFFECT = ("task_type", "inference_mode", "base_model_name_or_path", "revision")
_LORA_DEFAULTS: Mapping[str, Any] = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Those of peft, which are not those of TRL's command line."""
_PEFT_PLACE = 5
"""More arguments by position may have the adapter."""
_OBJECTS = ("tools", "environment_factory", "rollout_func", "callbacks", "teacher_model", "optimizers")
"""Arguments of a trainer that are objects of the script. Reward functions and data are reported where they are missing."""


@dataclass(slots=True)
class TrainingScript:
    """What a script says of a training."""

    trainer: str
    """The trainer's command: `grpo`, `distillation`, ..."""
    values: dict[str, Any] = field(default_factory=dict)
    """Arguments with literal values, by TRL's names."""
    others: list[tuple[str, str, str]] = field(default_factory=list)
    """Further arguments: their name, their text in the script, and why they are not taken."""
    rewards: list[str] = field(default_factory=list)
    """The reward functions that the trainer gets: names of functions of the script, `module.name` of imported ones, and names of
    models. Empty if the script does not say them in a form that is known."""
    tools: list[str] = field(default_factory=list)
    """The tools that the trainer gets: names of functions of the script, and `module.name` of imported ones. Empty if the script
    does not say them in a form that is known."""
    calls_tools: bool = False
    """Whether the trainer gets tools or an environment."""
    rows: dict[str, str] = field(default_factory=dict)
    """The expressions of the data sets that the trainer gets, `train_dataset` and `eval_dataset`, with the lines of the names in
    them."""
    hub: dict[str, str] = field(default_factory=dict)
    """Of these, the arguments of a plain `load_dataset(...)`."""
    defined: set[str] = field(default_factory=set)
    """Functions and classes that the script defines at its top."""
    trains_when_imported: bool = True
    """Whether more than definitions may run when the script is imported."""


def read_script(path: Path) -> TrainingScript:
    """The literal arguments of the script's only `GRPOConfig(...)` (or another configuration of TRL's trainers), its model, and
    its `LoraConfig(...)`.

    Raises ConfigError if the script cannot be read, or has none or several configurations.
    """
    text = read_text(path, error=ConfigError)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is no Python: {text_of(error) or 'it is nested too deeply'}") from None
    calls = list(_calls(tree))
    found = [(name, call) for name, call in calls if name in _TRAINERS]
    if len(found) != 1:
        lines = ", ".join(str(call.lineno) for _, call in found)
        has = f"configurations in the lines {lines}" if found else f"no call of {' or '.join(_TRAINERS)}"
        raise ConfigError(
            f"{path} has {has}: a script is read, not run, and must have one configuration. Print "
            "`training_args.to_json_string()` in the script, save it as args.json, and write "
            "`turnwise convert --from trl args.json`"
        )
    ((name, config),) = found
    script = TrainingScript(_TRAINERS[name])
    for key, value in _arguments(config):
        _take(script, key or "**", value)
    adapters = [call for name, call in calls if name == "LoraConfig"]
    trainers = [call for name, call in calls if name == name_of_trainer(script.trainer)]
    for call in trainers[:1]:
        given, assigned = _given(call), _assignments(tree)
        _take_objects(script, tree, given, assigned)
        for key, value in given.items():
            if key == "model":
                _take(script, "model_name_or_path", _followed(value, assigned))
            elif key == "peft_config" and len(adapters) != 1:
                script.others.append((key, ast.unparse(value), f"line {value.lineno} names no only LoraConfig(...)"))
            elif key in _OBJECTS and not _is_none(value) and not (key == "tools" and script.tools):
                script.others.append((key, ast.unparse(value), f"an object of the script, line {value.lineno}"))
    if len(adapters) == 1:
        _take_adapter(script, adapters[0], used=not trainers or _gets_adapter(calls, trainers[0]))
    return script


_OF_TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""The first arguments of GRPOTrainer by position."""


def _given(trainer: ast.Call) -> dict[str, ast.expr]:
    """The arguments of a trainer, by name."""
    first = dict(zip(_OF_TRAINER, trainer.args, strict=False))
    return first | {keyword.arg: keyword.value for keyword in trainer.keywords if keyword.arg is not None}


def _take_objects(
    script: TrainingScript, tree: ast.Module, given: Mapping[str, ast.expr], assigned: Mapping[str, ast.expr]
) -> None:
    """The reward functions, the tools and the data sets that a trainer is `given`, by the names that the script gives them at its
    top."""
    script.defined = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    script.trains_when_imported = not all(_only_defines(node) for node in tree.body)
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level
        for alias in node.names
    }
    values = {key: _followed(value, assigned) for key, value in given.items()}
    values = {key: value for key, value in values.items() if not _is_none(value)}
    script.rewards = _names(values.get("reward_funcs"), imported, script.defined)
    script.tools = _names(values.get("tools"), imported, script.defined)
    script.calls_tools = "tools" in values or "environment_factory" in values
    for key in ("train_dataset", "eval_dataset"):
        if (value := given.get(key)) is None:
            continue
        script.rows[key] = ast.unparse(value)
        found = _followed(value, assigned)
        if isinstance(found, ast.Call) and (loaded := _hub_data(found)) is not None:
            script.hub[key] = loaded


def _only_defines(node: ast.stmt) -> bool:
    """Whether a statement at the top of a script defines something, or runs only in the script that is started."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return "__name__" in {one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)}
    return not any(isinstance(one, ast.Call) for one in ast.walk(node))


def definitions(path: Path, names: Collection[str]) -> str | None:
    """The source of functions of a script, with the imports, definitions and assignments at its top that they use, in its order.
    None if they use a trainer.

    Raises ConfigError if the script cannot be read.
    """
    text = read_text(path, error=ConfigError)
    body, chosen, wanted = ast.parse(text).body, set[int](), list(names)
    while wanted:
        name = wanted.pop()
        for number, node in enumerate(body):
            if number not in chosen and name in _bound(node):
                chosen.add(number)
                wanted += [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]
    if any(called.endswith("Trainer") for number in chosen for called, _ in _calls(ast.Module([body[number]], []))):
        return None
    future = {n for n, node in enumerate(body) if isinstance(node, ast.ImportFrom) and node.module == "__future__"}
    lines, parts = text.splitlines(), list[str]()
    for node in (body[number] for number in sorted(chosen | future)):
        first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
        separated = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        parts += [*(["", ""] if separated and parts else []), *lines[first - 1 : node.end_lineno]]
    return "\n".join(parts) + "\n"


def program(path: Path, statements: Sequence[str]) -> str | None:
    """A program that runs statements on names of the script: its `definitions` of them, and the statements. None if a name is not
    defined at the top of the script, or needs a trainer.

    Raises ConfigError if the script cannot be read.
    """
    body = ast.parse(read_text(path, error=ConfigError)).body
    names = {one.id for one in ast.walk(ast.parse("\n".join(statements))) if isinstance(one, ast.Name)}
    if not names <= {name for node in body for name in _bound(node)}:
        return None
    text = definitions(path, sorted(names))
    return None if text is None else "\n".join([text, *statements, ""])


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a script defines, imports or assigns."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return []
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]


def _assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """The values of names that the script assigns exactly once."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
    return {name: found[0] for name, found in values.items() if len(found) == 1}


def _followed(value: ast.expr, assigned: Mapping[str, ast.expr]) -> ast.expr:
    """A value, or the one that its name has."""
    return assigned.get(value.id, value) if isinstance(value, ast.Name) else value


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _names(value: ast.expr | None, imported: Mapping[str, str], defined: set[str]) -> list[str]:
    """Names of the functions of a list, or of one function; empty if one has no name."""
    listed = value.elts if isinstance(value, ast.List | ast.Tuple) else [] if value is None else [value]
    names = [_function_name(one, imported, defined) for one in listed]
    return [name for name in names if name is not None] if None not in names else []


def _function_name(value: ast.expr, imported: Mapping[str, str], defined: set[str]) -> str | None:
    if isinstance(value, ast.Name):
        return value.id if value.id in defined else imported.get(value.id)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _hub_data(call: ast.Call) -> str | None:
    """`name:split` of `load_dataset("name", split="train")`, and `rows.jsonl:` of a file of rows (`data_files`); None for other
    calls."""
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    texts = [value.value if isinstance(value, ast.Constant) else None for value in call.args]
    known = {keyword.arg: keyword.value for keyword in call.keywords}
    split = known.pop("split", None)
    part = split.value if isinstance(split, ast.Constant) else None
    file = known["data_files"] if name == "load_dataset" and part == "train" and set(known) == {"data_files"} else None
    if isinstance(file, ast.Constant) and texts in (["json"], ["parquet"]):
        return f"{file.value}:" if str(file.value).endswith((".jsonl", ".parquet")) else None
    if name != "load_dataset" or len(texts) != 1 or not isinstance(texts[0], str) or known:
        return None
    return f"{texts[0]}:{part}" if isinstance(part, str) and part.isidentifier() else None


def _gets_adapter(calls: Sequence[tuple[str, ast.Call]], trainer: ast.Call) -> bool:
    """Whether a trainer may have an adapter: by its name, by position, in `**kwargs`, or because the model has it already."""
    named = any(keyword.arg in ("peft_config", None) for keyword in trainer.keywords)
    return named or len(trainer.args) > _PEFT_PLACE or any(name == "get_peft_model" for name, _ in calls)


def _take_adapter(script: TrainingScript, adapter: ast.Call, *, used: bool) -> None:
    if not used:
        text = f"the trainer does not get it (peft_config), line {adapter.lineno}"
        script.others.append(("LoraConfig", ast.unparse(adapter), text))
        return
    script.values |= {"use_peft": True, **_LORA_DEFAULTS}
    for key, value in _arguments(adapter):
        if key is not None and key in _LORA:
            _take(script, _LORA[key], value)
        elif key not in _LORA_WITHOUT_EFFECT:
            reason = f"an argument of LoraConfig that is not converted, line {value.lineno}"
            script.others.append((key or "LoraConfig", ast.unparse(value), reason))


def name_of_trainer(trainer: str) -> str:
    """The class of a trainer: `GRPOTrainer` of `grpo`."""
    (config,) = (name for name, command in _TRAINERS.items() if command == trainer)
    return config.replace("Config", "Trainer")


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """All calls of names, also of attributes (`trl.GRPOConfig(...)`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id, node
            elif isinstance(node.func, ast.Attribute):
                yield node.func.attr, node


def _arguments(call: ast.Call) -> Iterator[tuple[str | None, ast.expr]]:
    """The arguments by name; None: without a known name (`*args`, `**kwargs`, by position)."""
    for value in call.args:
        yield None, value
    for keyword in call.keywords:
        yield keyword.arg, keyword.value


def _take(script: TrainingScript, key: str, value: ast.expr) -> None:
    try:
        script.values[key] = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        script.others.append((key, ast.unparse(value), f"not literal, line {value.lineno}"))
    else:
        if key == "**":  # by position
            del script.values[key]
            script.others.append((key, ast.unparse(value), f"without a name, line {value.lineno}"))
