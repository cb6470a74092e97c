"""The commands of `tidegate-pipeline`: each reads its arguments, calls its job and shows the result."""
