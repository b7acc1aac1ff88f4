"""Collectives: their definitions and transposes, and the ledger of bytes sent."""
