"""Clients of services outside of the process: JSON over HTTP, and chat models."""
