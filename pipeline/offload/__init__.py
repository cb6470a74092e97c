"""Copying what the brokers have into the remote tier."""
