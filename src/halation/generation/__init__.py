"""Pictures by the thousand: plan, ledger, supervisor, workers."""
