"""What a run would do, cost and be able to tell, before it is run."""
