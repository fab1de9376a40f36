"""Supervised fine-tuning on given conversations."""
