"""Stands for liger-kernel in tests: the same functions in plain torch, which overwrite what those of the library overwrite."""
