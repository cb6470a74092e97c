"""Checks, measures, merges and rebuilds the content of a tier."""
