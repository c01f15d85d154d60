"""hdet in the trainers people use: one file a framework, each with an extra of its own."""
