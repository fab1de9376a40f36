"""Adapters that run classes and files of other systems unchanged.

Each folder is for one system. Adapters are ordinary environments: recipes name them, and only the loader and the command line
import them.
"""
