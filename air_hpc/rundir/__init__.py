"""The run directory: everything of a run that must survive, and the only code that knows its shape.

    layout   where things are
    atomic   write aside, fsync, rename, fsync of the directory; exclusive directories
    fence    tokens: who may write now
    events   the ledger's lines, written and read
    words    failure classes, verdicts, run states
    state    the fold of the ledger: what state a run is in, and where its time went
    commit   checkpoints: saved aside, committed by one rename, verified
    retention which checkpoints stay
    spool    metrics on their way to MLflow

All of it survives a kill -9 at any instruction. The file system is NFS or Lustre: names that were
absent may stay absent in a cache for a minute, so nothing here waits for a file to appear, and no
lock decides anything.
"""
