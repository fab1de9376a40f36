"""What a run will need and how fast it will be, before it starts: placement, memory, batch arithmetic, and a simulation."""
