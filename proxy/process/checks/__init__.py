"""What a process checks of itself: its event loop, open files, folders, rights and access to the store."""
