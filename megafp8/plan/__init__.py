"""Before a run starts: who stands where, and what each rank does when."""
