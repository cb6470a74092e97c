"""The commands under `tidegate tier`, one file each. Exit codes: 0 good, 1 findings, 2 misused, 3 failed.

Nothing here changes anything unless the operator says so: what would be written or deleted is shown first.
"""
