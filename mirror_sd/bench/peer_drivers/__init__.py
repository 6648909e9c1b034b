"""Other engines behind one protocol. This package runs under an interpreter that has them.

That interpreter need not have any of Mirror-SD's dependencies, so nothing in here imports the
rest of Mirror-SD: `peer_process` loads the package by its path, under the name `PACKAGE`.
"""
