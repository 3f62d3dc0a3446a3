"""The node side: one process a node that starts, watches and stops the workers."""
