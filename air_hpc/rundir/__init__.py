"""The run directory: layout, atomic writes, fence, ledger, commit protocol and spool."""
