"""The worker's contract with its agent."""
