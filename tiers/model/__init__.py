"""The values of KIP-405: identifiers, states and metadata of remote log segments. This package does no I/O."""
