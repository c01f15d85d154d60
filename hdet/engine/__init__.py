"""The cycle of fan out, train, compare, merge and move, and what it leans on."""
