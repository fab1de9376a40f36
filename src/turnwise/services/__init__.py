"""Services over HTTP: JSON and chat models as a client, and what the servers of the package share."""
