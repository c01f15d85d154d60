"""hdet around what is not its own: a training loop, a trainer, a torch scheduler."""
