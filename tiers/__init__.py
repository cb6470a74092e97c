"""The remote log: copies a partition's log from its leader to segments in a store, and reads record batches back.

Internal to Tidegate.
"""
