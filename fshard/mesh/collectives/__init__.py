"""Collectives: what they mean, their transposes, and the ledger of what they send."""
