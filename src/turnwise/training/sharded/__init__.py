"""Training on several devices: one process for each, with torch's FSDP2. Imported only if the recipe has a cluster."""
