"""scripts/model_table.py: a dozen families work as docs/models.md says; `make models` tries all."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOZEN = [
    *("llama", "qwen3", "gemma3_text", "gpt2"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3"),  # experts, sinks, latent attention
    *("qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1", "llama4_text"),  # recurrent states, chunks
]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """The script, which imports all that trains."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import model_table

    return model_table


def test_the_page_has_all_families(table: ModuleType) -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    tried = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert sorted(tried) == sorted(table.families())
    assert len(tried) >= 60


def test_the_tiny_model_has_all_kinds_of_layers(table: ModuleType) -> None:
    assert table.each_kind(["a", "a", "b", "a", "a", "b"]) == ["a", "b", "a", "b"]
    assert table.each_kind(["a", "b", "b", "b", "b"]) == ["a", "b", "b", "b"]
    assert table.each_kind([48] * 40, 4) == [4] * 4
    config = table.tiny_config("qwen3_5_text")
    assert (config.layer_types, config.hidden_size) == (["linear_attention", "full_attention"] * 2, 64)


@pytest.mark.slow
def test_a_dozen_families_work(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "model_table.py", *DOZEN, "--results", file], check=True, timeout=600
    )
    results = json.loads(file.read_text())
    assert {family: results[family]["problems"] for family in DOZEN} == {family: {} for family in DOZEN}
    # the next turn computes its new tokens only
    assert {results[family]["values"]["engine"]["cached"] for family in DOZEN} == {1.0}


def test_a_refused_family_says_why_and_does_not_recommend_what_nobody_tried(table: ModuleType, tmp_path: Path) -> None:
    result = table.try_family("deepseek_v32", tmp_path)
    assert list(result.problems) == ["engine"]
    assert "it has layers of the type indexed_attention" in result.problems["engine"]
    assert "docs/models.md lists the families that were tried" in result.problems["engine"]
