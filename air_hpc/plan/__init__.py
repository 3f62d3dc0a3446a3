"""What a run will need and cost, as arithmetic on a RunSpec. No torch, no I/O."""
