"""What all engines behind an HTTP server share: sessions, processes, replicas, joined completions, checks, weight updates."""
