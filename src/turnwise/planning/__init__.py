"""What a run will need, before it starts: placement, memory and batch arithmetic."""
