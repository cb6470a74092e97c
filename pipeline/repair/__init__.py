"""Checking, counting, merging, purging and making again what a tier holds."""
