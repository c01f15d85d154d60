"""hdet around a loop that is not its own: under a torch scheduler."""
