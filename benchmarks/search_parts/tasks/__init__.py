"""One file a task, each of which sets `TASK`."""
