"""Stand-ins that hold the same contracts as the real implementations."""
