"""Tests of engines. A package, because benchmarks/engines.py has the same name."""
