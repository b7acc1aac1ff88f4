"""What turns single-device functions into sharded ones."""
