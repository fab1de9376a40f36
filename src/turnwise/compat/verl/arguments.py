"""From a configuration of verl's to a recipe: what is carried over, what is not and why. Nothing is dropped without a word.

What is not given has verl's default, where that differs from ours. verl's own files (`ppo_trainer` and what it is made of) are
those defaults, and are not read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.chat.media_parts import has_media
from turnwise.chat.tool_calls import FORMATS
from turnwise.compat.converted import Converted, UnsupportedKey
from turnwise.compat.verl import optimization
from turnwise.compat.verl.keys import DEFAULTS, FIXED, HANDLED, PLAIN, ROLLOUT, TURNS, idle, machinery
from turnwise.compat.verl.ledger import Ledger
from turnwise.compat.verl.reward_score import GRADED
from turnwise.compat.verl.script import read_script
from turnwise.compat.yaml_files import MISSING, at, compose, leaves, override, resolved
from turnwise.data.rows import records
from turnwise.errors import ConfigError, DataError, nearest
from turnwise.types import Message

__all__ = ["from_verl_arguments"]

_PLACE = "turnwise.compat.verl"
_THEIRS = ("ppo_trainer", "ppo_megatron_trainer")
_GROUPS = (
    "actor", "algorithm", "critic", "data", "engine", "model", "optim", "profiler", "ref", "reward_manager",
    "reward_model", "rollout",
)  # fmt: skip


def from_verl_arguments(
    overrides: Sequence[str] = (), *, folder: str | Path | None = None, name: str | None = None
) -> Converted:
    """A recipe of what `python -m verl.trainer.main_ppo --config-path=FOLDER --config-name=NAME OVERRIDES` was given.

    Without a folder there are the overrides only. The first word may be one of verl's shell scripts, `run.sh`, whose arguments
    come first. Raises ConfigError if the configuration cannot be read.
    """
    tree: dict[str, Any] = {}
    unknown: list[str] = []
    if overrides and overrides[0].endswith(".sh") and "=" not in overrides[0]:
        script = read_script(Path(os.path.expanduser(overrides[0])))
        overrides = [*script.overrides, *overrides[1:]]
        folder, name, unknown = folder or script.folder, name or script.name, script.unknown
    if folder is not None:
        path = Path(os.path.expanduser(folder))
        if not os.path.isdir(path) and name in _THEIRS:
            path = None  # `--config-path=./config` is Hydra's: verl's own directory, which is not read
        elif not os.path.isdir(path):
            raise ConfigError(f"--config-path: there is no directory {path.absolute()}")
        if path is not None:
            tree = compose(path, name or _THEIRS[0], leaving_out=_is_theirs)
    elif name is not None and name not in _THEIRS:
        raise ConfigError(f"--config-name={name} needs --config-path, the directory of {name}.yaml")
    _switched(tree)
    for one in overrides:
        override(tree, [one])
        _switched(tree)
    tree, unresolved = resolved(tree, lambda key: DEFAULTS.get(key, MISSING))
    found = _Conversion(tree, unresolved).result()
    reason = "only a shell knows what this is: set the key, or the variable"
    found.guessed.extend(UnsupportedKey(*_parted(word), reason) for word in unknown)
    return found


def _parted(word: str) -> tuple[str, str]:
    key, _, value = word.lstrip("+").partition("=")
    return key, value


def _is_theirs(target: str) -> bool:
    return target in _THEIRS or target.split("/")[0] in _GROUPS


def _switched(tree: dict[str, Any]) -> None:
    """`multi_turn: True` is `multi_turn.enable: True`."""
    rollout = at(tree, ROLLOUT)
    if isinstance(at(rollout, "multi_turn"), bool):
        rollout["multi_turn"] = {"enable": rollout["multi_turn"]}


def _messages(prompt: Any) -> list[Message]:
    return [one for one in prompt if isinstance(one, dict)] if isinstance(prompt, list) else []


class _Conversion:
    """One recipe in the making."""

    def __init__(self, tree: dict[str, Any], unresolved: Sequence[str]) -> None:
        self._tree = tree
        self._given = dict(leaves(tree))
        self._book = Ledger(tree, DEFAULTS)
        self._unresolved = unresolved
        self._guessed: list[UnsupportedKey] = []
        self._rows: Sequence[Mapping[str, Any]] | None = None
        """Those of data.train_files, or None where they cannot be read."""

    def result(self) -> Converted:
        """The whole."""
        for key in self._unresolved:
            if machinery(key) is None:
                self._book.leave(key, "it names a key or a variable that is not there: set it", matters=True)
        self._fixed()
        for key, option in PLAIN.items():
            if (value := self._book.value(key)) is not None:
                self._book.set(option, value, key)
        self._model()
        self._data()
        interactive = self._conversation()
        optimization.lengths(self._book)
        optimization.optimization(self._book)
        optimization.trainer(self._book, optimization.steps(self._book, self._count()))
        self._reward(interactive)
        self._others()
        return Converted(self._book.recipe, self._book.carried, self._book.left, self._guessed)

    def _fixed(self) -> None:
        for key, (values, reason) in FIXED.items():
            value = at(self._tree, key)
            if value is MISSING:
                continue
            if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
                self._book.carry("as it is here", key)
            else:
                self._book.leave(key, reason, matters=True)

    def _model(self) -> None:
        key = "actor_rollout_ref.model.path"
        if self._book.says(key):
            self._book.set("model.path", os.path.expanduser(str(self._book.value(key))), key)
        else:
            self._book.leave(key, "name the model", matters=True, default=True)

    def _data(self) -> None:
        for key, option in (("data.train_files", "data.train"), ("data.val_files", "data.eval")):
            value = self._book.value(key)
            files = list(map(str, value if isinstance(value, list) else [] if value is None else [value]))
            if files:
                self._book.set(option, files[0] if len(files) == 1 else files, key)
                if option == "data.train":
                    self._read(files)
            elif option == "data.train":
                self._book.leave(key, "name the file of the rows", matters=True, default=True)
        for key, ours in (("data.prompt_key", "prompt"), ("data.image_key", "images"), ("data.video_key", "videos")):
            if self._book.value(key) not in (None, ours):
                self._book.set(f"data.columns.{ours}", self._book.value(key), key)
            self._book.carry(f"the column {ours}", key)
        source = self._book.value("data.reward_fn_key")
        if source != "data_source":
            self._book.set("data.columns.data_source", source, "data.reward_fn_key")
        self._book.carry("the column data_source", "data.reward_fn_key")
        self._book.carry("rows are always conversations", "data.return_raw_chat")
        if (most := self._book.whole("data.train_max_samples")) is not None:
            self._book.set("data.max_rows", most, "data.train_max_samples")
        self._book.carry("all rows", "data.train_max_samples")
        key = "data.filter_overlong_prompts"
        if self._book.value(key) is True and (longest := self._book.whole("data.max_prompt_length")) is not None:
            self._book.set("data.max_prompt_tokens", longest, key)
        self._book.carry("no row is left out", key)

    def _conversation(self) -> bool:
        """Who answers, and how often. Returns whether there is an interaction."""
        interaction, tools = self._file("interaction"), self._file("tool")
        switch = f"{TURNS}.enable"
        on = at(self._tree, switch)
        many = self._multiturn() or on is True or (on is not False and bool(interaction or tools))
        if on is False and (interaction or tools):
            self._book.leave(switch, "it contradicts the interaction or tool file: leave one out", matters=True)
        self._book.carry("limits.turns", switch)
        most_answers = self._user_turns(bool(interaction), bool(tools))
        arguments = {"interactions": interaction, "tools": tools, "max_user_turns": most_answers}
        if interaction or tools:
            given = {name: value for name, value in arguments.items() if value is not None}
            self._book.set("environment", {"use": f"{_PLACE}:Conversations", "arguments": given})
        self._tool_calls(bool(tools) or "tools" in self._book.recipe)
        self._turns(many)
        return bool(interaction)

    def _file(self, kind: str) -> str | None:
        """The interaction file or the tool file, by whichever of its names."""
        old = "interaction_config_file" if kind == "interaction" else "tool_kwargs.tools_config_file"
        keys = [
            f"{TURNS}.{kind}_config_path",
            f"{ROLLOUT}.{old}",
            *(["data.tool_config_path"] if kind == "tool" else []),
        ]
        named = {str(self._book.value(key)): key for key in keys if self._book.says(key)}
        if len(named) > 1:
            for key in list(named.values())[1:]:
                self._book.leave(key, f"{keys[0]} names another file: leave one out", matters=True)
        self._book.carry("environment", *keys)
        return next(iter(named), None)

    def _user_turns(self, interactive: bool, tools: bool) -> int | None:
        key = f"{TURNS}.max_user_turns"
        most = self._book.whole(key)
        if most is not None and tools and not interactive:  # since v0.7 the rounds of tools count
            self._book.carry("limits.turns: so many rounds of tools, and an answer", key)
            return None
        if most is not None and not interactive:
            self._book.leave(
                key, "it counts an interaction's answers, and there is none: say max_assistant_turns", matters=True
            )
            return None
        self._book.carry("environment.arguments.max_user_turns", key)
        return most

    def _turns(self, many: bool) -> None:
        key, other = f"{TURNS}.max_assistant_turns", "rollout.multiturn.max_turns"
        most = self._book.whole(key) or self._book.whole(other)
        rounds = self._book.whole(f"{TURNS}.max_user_turns")
        if many and rounds is not None and "max_user_turns" not in self._arguments():
            most = min(rounds + 1, most or rounds + 1)
        if many and most is None:  # verl's own bound where it has none
            lengths = [self._book.whole(f"data.max_{name}_length") or 0 for name in ("prompt", "response")]
            most = max(1, sum(lengths) // 3)
        if not many and self._book.says(key):
            self._book.leave(key, "multi_turn is off, so there is one turn", matters=True)
        self._book.set("limits.turns", most if many else 1, key, other)

    def _arguments(self) -> dict[str, Any]:
        """Those of the environment so far."""
        return self._book.recipe.get("environment", {}).get("arguments", {})

    def _tool_calls(self, tools: bool) -> None:
        options = ("max_parallel_calls", "max_tool_response_length", "tool_response_truncate_side")
        for name in options:
            if not tools:
                self._book.leave(f"{TURNS}.{name}", "there are no tools")
            elif self._book.value(f"{TURNS}.{name}") is not None:
                self._book.set(f"tool_calls.{name}", self._book.value(f"{TURNS}.{name}"), f"{TURNS}.{name}")
        key = f"{TURNS}.format"
        named = self._book.value(key)
        names = [format.name for format in FORMATS]
        if named in names and tools:
            self._book.set("tool_format", named, key)
        elif self._book.says(key):
            self._book.leave(key, f"the format is found out from the template (tool_format may be: {', '.join(names)})")

    def _multiturn(self) -> bool:
        """The block `rollout.multiturn` of an older description. Returns whether it is there and on."""
        place = "rollout.multiturn"
        if at(self._tree, place) is MISSING:
            return False
        if self._book.says(f"{place}.stop_tokens"):
            self._book.set("sampling.stop", self._book.value(f"{place}.stop_tokens"), f"{place}.stop_tokens")
        kind = f"{place}.environment.type"
        if self._book.says(kind) and self._book.value(kind) != "tool_calling":
            self._book.leave(kind, "there is tool_calling; write any other as an environment (README)", matters=True)
        self._book.carry("tools", kind)
        key = f"{place}.environment.tools"
        tools: list[dict[str, Any]] = []
        given = self._book.value(key) or []
        for tool in given if isinstance(given, list) else [given]:
            uses = {
                "sandbox": ("turnwise.environments.sandbox.fusion:SandboxFusion", "url"),
                "api": ("turnwise.environments.search:Search", "retrieval_service_url"),
            }
            known = set(tool) == {"name", "type", "endpoint"} if isinstance(tool, dict) else False
            if not known or tool["type"] not in uses:
                self._book.leave(key, f"{tool!r:.100} must have name, endpoint and type: sandbox or api", matters=True)
                continue
            use, option = uses[tool["type"]]
            tools.append({"use": use, "arguments": {option: tool["endpoint"]}})
        if tools:
            self._book.set("tools", tools)
            self._book.carry("tools, by the names that they have here (code_interpreter, search)", key)
        on = self._book.value(f"{place}.enabled") is not False
        self._book.carry("limits.turns", f"{place}.enabled")
        return on

    def _read(self, files: Sequence[str]) -> None:
        """Read the rows, where they are on this machine."""
        if not all(os.path.exists(os.path.expanduser(file)) for file in files):
            return
        try:
            self._rows = [one.record for file in files for one in records(file, split="train", subset=None)]
        except DataError:
            return
        image, video, prompt = (self._book.value(f"data.{name}_key") for name in ("image", "video", "prompt"))
        seeing = any(
            row.get(image or "images") or row.get(video or "videos") or has_media(_messages(row.get(prompt)))
            for row in self._rows
        )
        key = "data.return_multi_modal_inputs"
        if not seeing and self._book.says(key):
            del self._book.recipe["data"]["return_multi_modal_inputs"]
            self._book.leave(key, "no row holds an image; what tools return is never in the rows")

    def _count(self) -> int | None:
        """How many rows there are to train on."""
        most = self._book.whole("data.train_max_samples")
        return None if self._rows is None else len(self._rows[:most])

    def _reward(self, interactive: bool) -> None:
        """A user's function; or what an interaction gives; or verl's grader for the data."""
        old, new = "custom_reward_function", "reward.custom_reward_function"  # the latter since v0.8
        place = new if self._book.says(f"{new}.path") else old
        if place == new and self._book.says(f"{old}.path"):
            self._book.leave(f"{old}.path", f"{new}.path is another one: leave one out", matters=True)
        for part in ("path", "name", "reward_kwargs"):
            self._book.leave(f"{old if place == new else new}.{part}", "there is no path beside it")
        path, name, given = (f"{place}.{part}" for part in ("path", "name", "reward_kwargs"))
        if self._arguments() and (self._book.says(path) or not interactive):
            # verl's trainer records what tools and interactions give; its objective is the reward function alone
            self._arguments()["rewards"] = "record"
        if self._book.says(path):
            arguments = {"path": self._book.value(path), "name": self._book.value(name) or "compute_score"}
            if self._book.says(given):
                arguments["arguments"] = self._book.value(given)
            self._book.set(
                "reward.trajectory", [{"use": f"{_PLACE}:CustomScore", "arguments": arguments}], path, name, given
            )
            return
        for key in (name, given):
            self._book.leave(key, f"belongs to {path}")
        self._book.carry("the rewards of the conversation itself", path)
        if interactive:
            reason = (
                "what the interaction and its tools give is the reward here; verl's trainer only records it, and grades the "
                "whole response by data_source: environment.arguments.rewards=record and a function in reward.trajectory do that"
            )
            self._guessed.append(UnsupportedKey(path, None, reason))
            return
        self._book.set("reward.trajectory", [{"use": f"{_PLACE}:data_source_score"}])
        column = self._book.value("data.reward_fn_key")
        unknown = sorted({str(row.get(column)) for row in self._rows or ()} - set(GRADED))
        if unknown:
            reason = (
                f"there is no grader for {', '.join(map(repr, unknown))} here (there is: {', '.join(GRADED)}): set it"
            )
            self._book.leave(path, reason, matters=True, default=True)

    def _others(self) -> None:
        """Whatever nobody has looked at."""
        done = {*self._book.carried, *(left.key for left in self._book.left)}
        known = [*PLAIN, *HANDLED, *FIXED]
        for key, value in self._given.items():
            if any(key == one or key.startswith(f"{one}.") for one in done):
                continue
            if key in (*PLAIN, *HANDLED) and value is None:
                self._book.carry("nothing: it is not set", key)
            elif (reason := idle(key) or machinery(key)) is not None:
                self._book.leave(key, reason)
            elif value in (None, {}, []):
                self._book.leave(key, "it is not set")
            else:
                self._book.leave(key, f"turnwise knows no such key of verl's{nearest(key, known)}", matters=True)
