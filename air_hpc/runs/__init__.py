"""Finds runs and says what became of them: the side of a run that people see.

    find       a run by id, unique piece of an id, path, job id or `latest`
    jobs       the Slurm jobs and the local process that a ledger names
    process    whether a recorded local process is still the same one
    reconcile  the ledger's word against Slurm's and the machine's: a pure function
    status     all of it together, one scheduler call for any number of runs
    logs       the log files of attempts, generations and nodes, printed or followed
    progress   loss, tokens/s and MFU from the end of the spool
    summary    what a run did, once it has ended
    cancel     asks a run to end: the one thing here that writes (an event of the ledger)

Nothing here imports torch or mlflow.
"""
