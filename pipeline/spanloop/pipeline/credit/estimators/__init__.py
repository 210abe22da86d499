"""Credit estimators (METHODS 3) as pure functions, one kind a file; the ledger reconciles what they find."""
