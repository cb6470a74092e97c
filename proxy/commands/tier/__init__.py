"""The commands under `tidegate tier`, one file each. docs/day-to-day.md has their exit codes.

A command changes the cluster or the store only if the operator confirms it with an option. Without the option, the
command shows what it would write or delete.
"""
