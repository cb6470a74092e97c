"""Checks, measures, merges, purges and rebuilds the content of a tier."""
