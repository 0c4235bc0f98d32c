"""Quotas: reservations, the ledger, and shares where several processes serve."""
