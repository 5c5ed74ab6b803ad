"""colofunc: write a step for one device, run it on many."""
