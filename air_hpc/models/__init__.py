"""One decoder and its parts."""
