"""Copies log data from the brokers to the remote tier."""
