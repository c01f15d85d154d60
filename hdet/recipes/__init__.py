"""Ready-made engines: the recipe we stand behind, and the paper."""
