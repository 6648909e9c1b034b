"""The direct call: one process that answers at a terminal, without any server."""
