"""What happened and what it cost: events, composition, ledger and accountant."""
