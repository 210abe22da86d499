"""Content under keys that can be destroyed (docs/privacy.md, ADR 11): the key store, the vault, the erasure."""
