"""A scriptable broker for behaviour that a real broker does not show on request. Each API has one file."""
