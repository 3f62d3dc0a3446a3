"""Distributed checkpoints in the run directory's commit protocol.

    state   what a checkpoint holds, and how it goes back
    saver   staging, writing in the background, digests, the commit, retention
    loader  the newest candidate that verifies and loads

The shards are torch.distributed.checkpoint's, so that a checkpoint written on one mesh loads on
another. Tensors are read with `weights_only`; but the format's own `.metadata` is a pickle, and
whoever can write it can run code in the job. What protects it is the run directory, which belongs
to its user alone (0700, or a group the user named), and that no file is opened before its digest
was compared with the committed manifest. Nothing else in a checkpoint is pickled.
"""
