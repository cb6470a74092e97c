"""A broker for what a real one will not show, scriptable by API: one file each."""
