"""From ms-swift's arguments to a recipe: what is carried over, what is not and why. Nothing is dropped without a word.

What is not given has ms-swift's default, where that differs from ours.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.compat.converted import Converted, UnsupportedKey
from turnwise.compat.swift.args import REWARD_DEFAULTS
from turnwise.compat.swift.command import Given, read
from turnwise.compat.swift.flags import CHOICES, DEFAULTS, FIXED, MACHINERY, OPTIONS, REWARDS
from turnwise.compat.swift.kinds import positive
from turnwise.compat.swift.outcomes import orms
from turnwise.compat.swift.scheduler import multi_turns
from turnwise.errors import ConfigError, nearest
from turnwise.json_yaml import parse_json, read_text

__all__ = ["COMPUTED", "from_swift_arguments"]

_PLACE = "turnwise.compat.swift"
REWARD_ARGUMENTS = tuple(key for key in REWARD_DEFAULTS if key != "max_completion_length")
"""Arguments of ms-swift's own reward functions."""
_READS = re.compile(r"\b(?:args|trainer_state)\.([a-z_]\w*)")
"""What the code of a reward function reads of ms-swift's arguments."""
_SHARE = "below 1 it is a share of all steps in ms-swift, and {} is a number of steps: set it"
_PREFIXES = {"cosine": "cosine_", "repetition": "repetition_", "soft_overlong": "soft_"}

COMPUTED = (
    "dataset", "val_dataset", "columns", "split_dataset_ratio", "data_seed", "max_length", "max_steps", "num_train_epochs",
    "per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size", "steps_per_generation",
    "global_batch_size", "learning_rate", "warmup_ratio", "warmup_steps", "adam_beta1", "adam_beta2", "epsilon",
    "epsilon_high", "top_k",
    "max_completion_length", "completion_length_limit_scope", "loss_scale", "multi_turn_scheduler", "max_turns",
    "external_plugins", "use_gym_env", "gym_env", "context_manager", "reward_funcs", "reward_weights", "eval_steps",
    *REWARD_ARGUMENTS,
)  # fmt: skip
"""Arguments of which several make one option, or one several."""

_MANY_TURNS = 100
_FILES = (".jsonl", ".json", ".parquet", ".csv", ".txt", ".arrow")


def from_swift_arguments(source: str | Path | Sequence[str] | Mapping[str, Any]) -> Converted:
    """A recipe of what `swift rlhf --rlhf_type grpo` and `swift rollout` were given.

    `source` is a mapping, the words of a command line, or a `.yaml`, `.json` or `.sh` file; a script may hold both commands.

    Raises ConfigError if it cannot be read.
    """
    return _Conversion(read(source)).result()


class _Conversion:
    """One recipe in the making."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._recipe: dict[str, Any] = {}
        self._carried: dict[str, str] = {}
        self._left: list[UnsupportedKey] = []
        self._guessed: list[UnsupportedKey] = []
        self._minibatches = 1

    def result(self) -> Converted:
        """The whole."""
        self._plain()
        self._data()
        self._hubs()
        self._conversation()
        self._batches()
        self._clipping()
        self._steps()
        self._rewards()
        self._others()
        return Converted(self._recipe, self._carried, self._left, self._guessed)

    # how an argument is asked for and ticked off

    def _value(self, key: str) -> Any:
        value = self._given.values.get(key)
        return DEFAULTS.get(key) if value is None else value

    def _set(self, option: str, value: Any, *keys: str) -> None:
        """Set an option of the recipe; `keys` are the arguments that made it."""
        node = self._recipe
        *parents, last = option.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
        self._carry(option, *keys)

    def _carry(self, what: str, *keys: str) -> None:
        for key in keys:
            if key in self._given.values:
                self._carried[key] = f"{self._carried[key]}, {what}" if key in self._carried else what

    def _leave(self, key: str, reason: str, *, matters: bool = False, value: Any = None) -> None:
        self._carried.pop(key, None)
        self._left.append(UnsupportedKey(key, self._given.values.get(key, value), reason, matters))

    # what becomes of them

    def _plain(self) -> None:
        for key, option in OPTIONS.items():
            value = self._value(key)
            if key in self._given.values and value is None:
                self._carry("nothing: it is not set", key)
            elif key == "save_steps" and isinstance(value, float):
                self._leave(key, _SHARE.format("checkpoint.every"))
            elif value is not None and not (key == "system" and self._file_of_system(value)):
                self._set(option, value, key)
        for key, (option, names) in CHOICES.items():
            value = self._value(key)
            name = str(value).lower()
            if (value is not None or key in self._given.values) and name in names:
                self._set(option, names[name], key)
            elif value is not None:
                self._leave(key, f"{option} knows {', '.join(names)} by ms-swift's names", matters=True)
            elif key in self._given.values:
                self._carry(option, key)
        if (top_k := self._value("top_k")) is not None:
            self._set("sampling.top_k", max(top_k, 0), "top_k")
        self._set("train.betas", [float(self._value(key)) for key in ("adam_beta1", "adam_beta2")])
        self._carry("train.betas", "adam_beta1", "adam_beta2")
        if self._given.values.get("learning_rate") is None:
            self._set("train.lr", 1e-5)  # ms-swift's own where all parameters are trained

    def _file_of_system(self, value: str) -> bool:
        """Whether the system message is a file's; in ms-swift it is where there is a file of that name."""
        path = self._given.find(value)
        if path is not None:
            self._set("data.system_prompt", read_text(path, error=ConfigError), "system")
        elif value.endswith(".txt"):
            self._leave(
                "system", "there is no file of that name: run from the folder that it is relative to", matters=True
            )
        return path is not None or value.endswith(".txt")

    def _data(self) -> None:
        given = self._given.values
        columns: dict[str, str] = {}
        for key, option in (("dataset", "data.train"), ("val_dataset", "data.eval")):
            names = given.get(key) or []
            if len(names) > 1:
                self._leave(key, f"{option} is one data set; put them into one file", matters=True)
            elif names:
                name, hashed, limit = names[0].partition("#")
                name, _, subset = name.partition(":") if not os.path.exists(name) else (name, "", "")
                self._set(option, name, key)
                if subset:
                    self._set("data.subset", subset, key)
                if hashed:
                    rows = positive(f"--{key} {names[0]}: the number of rows", limit)
                    self._set("data.max_rows" if key == "dataset" else "eval.max_rows", rows, key)
        if not given.get("dataset"):
            self._leave("dataset", "no data set is named: set data.train", matters=True)
        for name, meaning in (given.get("columns") or {}).items():
            columns["prompt" if meaning in ("messages", "query", "prompt", "problem") else meaning] = name
        self._carry("data.columns", "columns")
        if "prompt" not in columns:
            known = self._prompt_column()
            columns["prompt"] = known or "messages"
            if known is None and given.get("dataset"):
                why = "the data could not be looked into here, so the column of the prompts is a guess: data.columns.prompt"
                self._guessed.append(UnsupportedKey("columns", "messages", why))
        if columns != {"prompt": "prompt"}:
            self._set("data.columns", columns)
        if "split_dataset_ratio" in given:
            if given["split_dataset_ratio"]:
                self._leave(
                    "split_dataset_ratio", "held-out rows are a file or a split of their own: data.eval", matters=True
                )
            else:
                self._carry("nothing: no rows are held out", "split_dataset_ratio")
        if "data_seed" in given:
            if given["data_seed"] == self._value("seed"):
                self._carry("seed", "data_seed")
            else:
                self._leave("data_seed", "there is one seed, for everything: seed")

    def _prompt_column(self) -> str | None:
        """The column of the conversations, where there is a file to look it up in."""
        path = Path(str(self._recipe.get("data", {}).get("train", "")))
        if path.suffix not in (".jsonl", ".json") or not os.path.isfile(path):
            return None
        try:
            with path.open(encoding="utf-8-sig") as lines:
                first = parse_json(next(lines, "{}"), where=str(path), error=ConfigError)
        except (ConfigError, OSError, UnicodeDecodeError):
            return None
        known = ("messages", "prompt", "query", "problem", "question")
        return next((name for name in known if isinstance(first, dict) and name in first), None)

    def _hubs(self) -> None:
        """Names that ms-swift looks up on ModelScope."""
        if self._given.values.get("use_hf"):
            return
        for key, option in (("model", "model.path"), ("dataset", "data.train"), ("val_dataset", "data.eval")):
            node, _, last = option.partition(".")
            name = str(self._recipe.get(node, {}).get(last, ""))
            if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name) and Path(name).suffix not in _FILES:
                why = (
                    "ms-swift takes it from ModelScope, here it is Hugging Face's of this name: see that it is the same"
                )
                if key != "model":
                    why += "; its columns are not prepared as ms-swift does for the data sets it knows (data.columns)"
                self._guessed.append(UnsupportedKey(key, name, why))

    def _conversation(self) -> None:
        given, arguments = self._given.values, dict[str, Any]()
        length = self._value("max_completion_length")
        self._set("limits.tokens_per_turn", length, "max_completion_length")
        if given.get("completion_length_limit_scope") == "total":
            self._set("limits.tokens", length, "completion_length_limit_scope", "max_completion_length")
        else:
            self._carry("limits.tokens_per_turn", "completion_length_limit_scope")
        name = given.get("multi_turn_scheduler")
        gym = bool(given.get("use_gym_env") or given.get("gym_env"))
        if name is None and gym:
            name = "gym_scheduler"
        plugins = given.get("external_plugins") or []
        if name is not None:
            arguments["name"] = name
            for key in ("max_turns", "use_gym_env", "gym_env", "context_manager"):
                if given.get(key) is not None:
                    arguments[key] = given[key]
            if plugins:
                arguments["external_plugins"] = plugins
            if plugins or name not in multi_turns:  # a plugin's may ask for one; it is loaded only if it does
                arguments["tokenizer"] = given.get("model")
        elif "max_turns" in given:
            self._leave("max_turns", "there is no scheduler, so there is one turn")
        if name is None and given.get("vllm_mode") == "server" and self._given.rollout == "unknown":
            why = (
                "the arguments of `swift rollout`, where a scheduler would be, are not known: there is one turn. Give them too, "
                "or vllm_mode=colocate if there is no scheduler"
            )
            self._leave("vllm_mode", why, matters=True)
        if self._given.rollout == "comment":
            why = "it stands in a comment of the script, and was read from there: see that it is what you run"
            self._guessed.append(UnsupportedKey("swift rollout", name, why))
        turns = (given.get("max_turns") or _MANY_TURNS) if name is not None else 1
        self._set("limits.turns", turns, *(["max_turns"] if name is not None else []))
        self._set("environment", {"use": f"{_PLACE}:scheduler", "arguments": arguments})
        made_of = "multi_turn_scheduler max_turns use_gym_env gym_env context_manager external_plugins"
        for key in made_of.split():
            if key not in {left.key for left in self._left}:
                self._carry("environment", key)
        self._loss_scale(many=name is not None)

    def _loss_scale(self, *, many: bool) -> None:
        scale = self._given.values.get("loss_scale") or ("default" if many else "last_round")
        if scale not in ("default", "all", "last_round"):
            self._leave("loss_scale", "loss_mask knows all and last_round; write a function of your own", matters=True)
        elif many and scale == "last_round":
            self._set("loss_mask", "last_round", "loss_scale")
        else:
            self._carry("loss_mask", "loss_scale")

    def _rewards(self) -> None:
        given = self._given.values
        names, weights = given.get("reward_funcs") or [], given.get("reward_weights") or []
        plugins = given.get("external_plugins") or []
        gym = _gym(self._recipe)
        count = len(names) + gym
        if weights and len(weights) != count:
            self._leave("reward_weights", f"{len(weights)} weights for {count} rewards", matters=True)
            weights = []
        uses: list[dict[str, Any]] = []
        for number, name in enumerate(names):
            if name not in orms and (not plugins or (name in REWARDS and not _registered(name, plugins))):
                why = f"there is no reward function {name!r} here; there are {', '.join(sorted(orms))}, and those of a plugin"
                self._left.append(UnsupportedKey("reward_funcs", name, why, matters=True))
                continue
            arguments: dict[str, Any] = {"use": name, **({"external_plugins": plugins} if plugins else {})}
            if args := self._reward_args(name, plugins):
                arguments["args"] = args
            use: dict[str, Any] = {"use": f"{_PLACE}:Reward", "name": name, "arguments": arguments}
            if weights and weights[number] != 1:
                use["weight"] = float(weights[number])
            uses.append(use)
        if uses:
            self._set("reward.group", uses)
        if weights and gym and weights[-1] != 1:
            self._recipe["environment"]["arguments"]["gym_weight"] = float(weights[-1])
        self._carry("reward.group", "reward_funcs", "external_plugins")
        if "reward_weights" not in {left.key for left in self._left}:
            self._carry("reward.group", "reward_weights")
        for key in REWARD_ARGUMENTS:
            if key in given and key not in self._carried:
                self._leave(key, "no reward function here asks for it")

    def _reward_args(self, name: str, plugins: Sequence[str]) -> dict[str, Any]:
        """The arguments of ms-swift that a reward function reads from its `args`, as far as they are known."""
        if name in _PREFIXES and not _registered(name, plugins, unread=False):
            wanted = [
                key for key in REWARD_DEFAULTS if key.startswith(_PREFIXES[name]) or key == "max_completion_length"
            ]
        else:
            wanted = sorted(
                {key for text in _texts(plugins) for key in re.findall(r"\b(?:args|trainer_state)\.([a-z_]\w*)", text)}
            )
        if name == "repetition":
            wanted.remove("max_completion_length")
        found = {key: value for key in wanted if (value := self._value(key)) is not None}
        if "max_steps" in wanted and (steps := self._recipe["train"].get("steps")) is not None:
            found["max_steps"] = steps  # those of this run: of `trainer_state.global_step` too
        self._carry("reward.group", *(key for key in found if key in REWARD_ARGUMENTS))
        return found

    def _batches(self) -> None:
        """Rows of a step and optimizer steps on it, from what ms-swift calls generation batches."""
        keys = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "generation_batch_size",
            "steps_per_generation",
            "global_batch_size",
        )
        processes, group = self._given.processes, self._value("num_generations")
        each = self._value("per_device_train_batch_size") * processes
        accumulate = self._value("gradient_accumulation_steps") or max(1, math.ceil(16 / each))
        per_generation = self._value("steps_per_generation") or accumulate
        whole = self._value("generation_batch_size") or each * per_generation
        of_all = self._given.values.get("global_batch_size")
        if of_all is not None:  # of megatron: the conversations of an optimizer step
            each, accumulate = of_all, 1
            whole = self._value("generation_batch_size") or each * (self._value("steps_per_generation") or 1)
        self._set("train.batch_size", max(1, whole // group))
        told = f"train.batch_size, train.minibatches ({whole} conversations a step, with {processes} processes)"
        self._carry(told, *keys)
        self._minibatches = max(1, round(whole / (each * accumulate)))
        if self._minibatches > 1:
            self._set("train.minibatches", self._minibatches)
        if whole % group:
            self._left.append(
                UnsupportedKey("num_generations", group, f"does not divide the {whole} conversations of a step")
            )

    def _clipping(self) -> None:
        given = self._given.values
        off = self._minibatches > 1 or self._value("num_iterations") > 1 or bool(given.get("async_generate"))
        low, high = given.get("epsilon"), given.get("epsilon_high")
        if not off:
            for key in ("epsilon", "epsilon_high"):
                if key in given:
                    self._leave(key, "no effect with one optimizer step on each batch: the ratio is 1")
            return
        if low is not None:
            self._set("train.clip_low", low, "epsilon")
        if high is not None or low is not None:
            self._set("train.clip_high", high if high is not None else low, "epsilon", "epsilon_high")

    def _steps(self) -> None:
        given = self._given.values
        of_theirs = self._minibatches * self._value("num_iterations")  # optimizer steps of one step here
        steps: int | None = None
        if given.get("max_steps") and given["max_steps"] > 0:
            steps = max(1, round(given["max_steps"] / of_theirs))
            if "num_train_epochs" in given:
                self._leave("num_train_epochs", "max_steps says when training ends")
        elif (rows := self._count_rows()) is not None:
            steps = max(1, math.ceil(self._value("num_train_epochs") * rows / self._recipe["train"]["batch_size"]))
            self._carry("train.steps", "num_train_epochs")
        else:
            value = float(self._value("num_train_epochs"))
            why = "training ends after train.steps, and how many rows there are is not known here: set it"
            self._leave("num_train_epochs", why, matters=True, value=value)
        if steps is not None:
            self._set("train.steps", steps, "max_steps")
        warm = given.get("warmup_steps")
        if warm is None and steps is not None:
            warm = math.ceil(self._value("warmup_ratio") * steps)
        if warm:
            self._set("train.warmup_steps", warm, "warmup_steps")
        self._carry("train.warmup_steps", "warmup_ratio", "warmup_steps")
        if "eval_steps" in given:
            if isinstance(given["eval_steps"], float):
                self._leave("eval_steps", _SHARE.format("eval.every"))
            elif given.get("val_dataset"):
                self._set("eval.every", given["eval_steps"], "eval_steps")
            else:
                self._leave("eval_steps", "there are no held-out rows: data.eval")

    def _count_rows(self) -> int | None:
        data = self._recipe.get("data", {})
        path = Path(str(data.get("train", "")))
        if path.suffix != ".jsonl" or not os.path.isfile(path) or not os.access(path, os.R_OK):
            return data.get("max_rows")
        with path.open("rb") as lines:
            count = sum(bool(line.strip()) for line in lines)
        return min(count, data.get("max_rows") or count)

    def _others(self) -> None:
        given, known = self._given.values, {*OPTIONS, *CHOICES, *FIXED, *COMPUTED}
        told = {left.key for left in self._left}
        for key in sorted({*given, "tuner_type"} - set(self._carried) - told):
            value = self._value(key)
            if key in FIXED:
                fine, why = FIXED[key]
                if any(value is one or (value == one and not isinstance(value, bool)) for one in fine):
                    self._carry("nothing: it is so here", key)
                else:
                    self._leave(key, why, matters=True, value=value)
            elif (reason := _machinery(key)) is not None:
                self._leave(key, reason)
            elif key == "max_length":
                self._leave(key, "prompts are not cut here: limits.context bounds a conversation", matters=False)
            else:
                hint = nearest(key, known)
                self._leave(key, f"not known here as an argument of ms-swift{hint}", matters=True)
        for key, value in self._given.twice.items():
            self._left.append(UnsupportedKey(key, value, f"the commands give it twice; {given[key]!r} was taken"))
        for key, value in self._given.environment.items():
            self._left.append(
                UnsupportedKey(key, value, "a variable of the shell: set it yourself if your code asks for it")
            )


def _gym(recipe: Mapping[str, Any]) -> bool:
    arguments = recipe["environment"]["arguments"]
    return bool(
        arguments.get("use_gym_env")
        or arguments.get("gym_env")
        or arguments.get("name") in ("gym_scheduler", "openenv_scheduler")
    )


def _registered(name: str, plugins: Sequence[str], *, unread: bool = True) -> bool:
    """Whether a plugin speaks of a name in quotation marks; what cannot be read does so if `unread`."""
    texts = _texts(plugins)
    quoted = re.compile(rf"[\"']{re.escape(name)}[\"']")
    return (unread and len(texts) < len(plugins)) or any(quoted.search(text) for text in texts)


def _texts(plugins: Sequence[str]) -> list[str]:
    """The plugins that are there to be read."""
    files = [os.path.expanduser(plugin) for plugin in plugins]
    return [read_text(Path(file), error=ConfigError) for file in files if os.path.isfile(file)]


def _machinery(key: str) -> str | None:
    for pattern, reason in MACHINERY:
        if re.fullmatch(pattern, key):
            return reason
    return None
