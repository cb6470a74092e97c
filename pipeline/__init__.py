"""PySpark jobs over the remote tier's segments; stands beside `proxy` on `tiers`, neither knows the other."""
