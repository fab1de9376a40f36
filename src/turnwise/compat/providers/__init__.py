"""Environments of other people's libraries, by name: `environment: reasoning_gym:countdown`. One file for each library."""
