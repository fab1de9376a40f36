"""Reinforcement learning over conversations of many turns."""
