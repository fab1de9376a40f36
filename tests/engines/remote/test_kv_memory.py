"""The memory of a KV cache: bytes of a token, and the default of servers on the CPU."""

from __future__ import annotations

from turnwise.models.model_config import cpu_memory_gb, kv_token_bytes

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3}


def test_bytes_of_a_token_in_the_kv_cache() -> None:
    assert kv_token_bytes(CONFIG, "float32") == 2 * 3 * 2 * 32 * 4
    assert kv_token_bytes({"text_config": CONFIG}, "bfloat16") == 2 * 3 * 2 * 32 * 2
    old = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 1}
    assert kv_token_bytes(old, "float32") == 2 * 64 * 4


def test_the_cache_of_a_server_on_the_cpu_holds_a_sequence_and_at_least_a_gigabyte() -> None:
    assert cpu_memory_gb(CONFIG, "float32", 2048) == 1.0
    million = cpu_memory_gb(CONFIG, "float32", 2**20)
    assert million == (2**20 + 512) * kv_token_bytes(CONFIG, "float32") / 2**30 > 1.0
