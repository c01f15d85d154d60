"""The parts of `benchmarks/trainers.py`: what is trained, and by which trainers."""
