"""Rewards, the weight of each turn in the loss, and credit assignment."""
