"""Ships the spool and the ledger to MLflow."""
