"""Ids in, ids and log-probabilities out."""
