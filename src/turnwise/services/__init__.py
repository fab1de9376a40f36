"""HTTP, as client and as server.

Clients of services outside of the process: JSON over HTTP, and chat models.

Servers that come with the package.
"""
