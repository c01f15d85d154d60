"""One file a contender, each of which sets `CONTENDER`."""
