"""The values of KIP-405: identifiers, states and metadata of remote log segments. No I/O."""
