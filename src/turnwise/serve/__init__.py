"""Servers that come with the package."""
