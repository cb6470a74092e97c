"""What a process sets up before it serves, and keeps until it ends."""
