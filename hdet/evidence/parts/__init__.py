"""What several kinds of evidence are made of."""
