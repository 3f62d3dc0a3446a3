"""The worker: the native training loop."""
