"""Fakes that fulfil the same contracts as the real implementations."""
