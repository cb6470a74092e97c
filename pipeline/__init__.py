"""PySpark jobs and Spark data sources over the remote tier's segments.

The package builds on `tiers`, as `proxy` does; `pipeline` and `proxy` never import each other. Internal to Tidegate.
`tidegate.read` is its public function.
"""
