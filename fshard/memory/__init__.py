"""Memory kinds: "device", "host" and "disk"; transfers between them, and limits."""
