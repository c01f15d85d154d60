"""The command `hdet`, the runs it makes and the studies over them."""
