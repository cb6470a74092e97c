"""The commands of `tidegate-pipeline`. Each one parses its arguments, calls its job and shows the result."""
