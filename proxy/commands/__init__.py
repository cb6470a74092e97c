"""The commands of `tidegate`: `check`, the reference of the settings, and `tier/` for `tidegate tier`."""
