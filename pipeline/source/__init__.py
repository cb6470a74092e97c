"""Reading a topic of both tiers as columns: Spark's data sources and what they are made of."""
