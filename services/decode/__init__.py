"""The decode role: gather a prompt's blocks from their sources, then generate."""
