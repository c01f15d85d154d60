"""From the losses of one window to slopes: one estimator a file."""
