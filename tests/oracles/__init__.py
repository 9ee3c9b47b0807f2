"""Slow, independent answers to compare with."""
