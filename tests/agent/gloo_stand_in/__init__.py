"""A stand-in for an engine with torch: ranks that do nothing but reduce together."""

PRELOAD = ("torch", "torch.distributed", "torch.distributed.device_mesh")
