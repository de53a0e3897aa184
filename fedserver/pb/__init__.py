"""The operator's part of the contract as generated code (make proto)."""
