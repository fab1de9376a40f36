"""verl's functions that read its two files, and what its preprocessing scripts import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compat.verl.verl_files import PLUGINS, a_tool, an_interaction, written
from turnwise.compat.verl import BaseInteraction, verl_names
from turnwise.compat.verl.files import (
    get_interaction_class,
    initialize_interactions_from_config,
    initialize_tools_from_config,
)
from turnwise.compat.verl.helpers import copy, copy_to_local, exists, last_boxed_only_string, makedirs, remove_boxed
from turnwise.errors import ConfigError

BASE = {"class_name": "verl.interactions.base.BaseInteraction", "config": {"mine": 3}}


def interactions(folder: Path, *entries: Any) -> dict[str, Any]:
    return initialize_interactions_from_config(written(folder / "i.yaml", {"interaction": list(entries)}))


def test_interactions_are_made_by_name(tmp_path: Path) -> None:
    gsm8k = {"class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction"}
    made = interactions(tmp_path, BASE, {**gsm8k, "name": "other"}, gsm8k)
    assert {name: type(one).__name__ for name, one in made.items()} == {
        "base": "BaseInteraction",
        "other": "Gsm8kInteraction",
        "gsm8k": "Gsm8kInteraction",
    }
    assert made["base"].config == {"mine": 3, "name": "base"}
    assert made["other"].name == "other"
    assert interactions(tmp_path) == {}
    with pytest.raises(ValueError, match="Duplicate interaction name 'base' found"):
        interactions(tmp_path, BASE, BASE)
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"):
        interactions(tmp_path, {**BASE, "class_name": "nowhere.at_all.Class"})


def test_a_class_of_verl_s_is_found_by_its_name() -> None:
    with verl_names():
        from verl.interactions.utils import interaction_registry  # type: ignore[import-not-found]
    assert interaction_registry.get_interaction_class is get_interaction_class
    assert get_interaction_class("verl.interactions.base.BaseInteraction") is BaseInteraction


def test_tools_are_made_in_the_order_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))
    described = {"class_name": "verl_user.SelfDescribedTool", "config": {"type": "native"}}
    made = initialize_tools_from_config(written(tmp_path / "t.yaml", {"tools": [a_tool(), described]}))
    assert [tool.name for tool in made] == ["count", "described"]
    assert made[1].config == {"type": "native"}
    remote = {**described, "config": {"type": "mcp"}}
    with pytest.raises(ConfigError, match="is a tool of an MCP server, which only a run can connect"):
        initialize_tools_from_config(written(tmp_path / "t.yaml", {"tools": [remote]}))
    with pytest.raises(ConfigError, match="`tools` must be a list"):
        initialize_tools_from_config(written(tmp_path / "t.yaml", {"interaction": [an_interaction()]}))


def test_files_are_copied_as_a_preprocessing_script_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "a" / "b"
    makedirs(str(made))
    makedirs(str(made), exist_ok=True)
    (made / "train.parquet").write_text("rows")
    assert copy(src=str(made), dst=str(tmp_path / "copy")) == str(tmp_path / "copy")
    assert (tmp_path / "copy" / "train.parquet").read_text() == "rows"
    copy(str(made / "train.parquet"), str(tmp_path))
    assert exists(str(tmp_path / "train.parquet"))
    assert copy_to_local(str(made)) == str(made)
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no `hdfs`
    with pytest.raises(FileNotFoundError, match="`hdfs` is not on the path"):
        makedirs("hdfs://host/folder")


def test_files_on_hdfs_are_the_command_line_tool_s_affair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "hdfs"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *missing*) exit 1;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    makedirs("hdfs://h/a b")
    assert (exists("hdfs://h/a"), exists("hdfs://h/missing")) == (True, False)
    copy("local", "hdfs://h/a")
    copy("hdfs://h/a", "local")
    copy("hdfs://h/a", "hdfs://h/b")
    with pytest.raises(OSError, match="ended with status 1"):
        copy("hdfs://h/missing", "local")
    assert (tmp_path / "asked").read_text().splitlines() == [
        "dfs -mkdir -p hdfs://h/a b",
        "dfs -test -e hdfs://h/a",
        "dfs -test -e hdfs://h/missing",
        "dfs -put -f local hdfs://h/a",
        "dfs -get hdfs://h/a local",
        "dfs -cp -f hdfs://h/a hdfs://h/b",
        "dfs -get hdfs://h/missing local",
    ]


@pytest.mark.parametrize(
    ("text", "found", "inside"),
    [
        (r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"$\boxed 7$ is it", r"\boxed 7", "7"),
        (r"\fbox{3}", r"\fbox{3}", None),
        (r"\boxed{3", None, None),
        ("nothing", None, None),
    ],
)
def test_the_last_box_of_a_text(text: str, found: str | None, inside: str | None) -> None:
    assert last_boxed_only_string(text) == found
    if inside is not None and found is not None:
        assert remove_boxed(found) == inside
    elif found is not None:
        with pytest.raises(ValueError, match="is not of the form"):
            remove_boxed(found)
