"""Spark's data sources over a topic's two tiers, and their parts."""
