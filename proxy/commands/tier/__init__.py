"""The commands under `tidegate tier`, one file each. Exit codes: 0 success, 1 findings, 2 wrong usage, 3 failure.

A command changes the cluster or the store only if the operator confirms it with an option. Without the option, the
command shows what it would write or delete.
"""
