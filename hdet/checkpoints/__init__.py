"""A search in checkpoints: by torch.distributed.checkpoint, and as folders."""
