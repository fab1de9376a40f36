"""Classes and files that were written for other systems, and work here as they are.

Each folder is one system. Adapters are environments like any other: recipes name them, and nobody imports them but the loader
and the command line.
"""
