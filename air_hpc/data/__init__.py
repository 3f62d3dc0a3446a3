"""Token shards and the global sample order."""
