"""The MLflow shipper: from the spool and the ledger of a run to one MLflow run.

    uri        which stores are taken, and their addresses without secrets
    coverage   which sample of which step is in the store: pure decisions about roll-backs
    position   what was shipped, kept in the run directory so that a restart goes on from there
    describe   params, tags, status and control metrics of a run: pure
    artifacts  the small files worth keeping beside the metrics
    store      the one module that imports mlflow
    samples    ships the spools of one run
    shipper    ships one run, a pass at a time
    sync       many runs in one foreground process
    __main__   the process that the coordinator's agent starts: python -m air_hpc.tracking RUN_DIR

The store is the truth about what it holds; the position only saves asking. Shipping the same sample
twice changes nothing, since MLflow drops a row of equal (key, step, timestamp, value). So a crash
at any instruction loses nothing and doubles nothing.

Importing this package imports no mlflow; `store` does on its first connection.
"""
