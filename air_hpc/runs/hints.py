"""What a user can do about each failure class, where no rule of the table has a word of its own."""

from __future__ import annotations

from air_hpc.rundir.words import FailureClass

_HINTS = {
    FailureClass.PREEMPTED: "Others had priority; it goes on by itself. Where that costs much, "
    "lower checkpoint.interval_steps.",
    FailureClass.TIME_LIMIT: "It goes on by itself. Where nothing newer was saved, raise "
    "launch.time_limit_min or launch.lead_s.",
    FailureClass.REQUEUED: "Slurm starts it again.",
    FailureClass.CANCELLED: "Its owner ended it.",
    FailureClass.NODE_LOST: "The node is the site's to mend; where it comes again, keep it out: "
    "python -m air_hpc nodes --help",
    FailureClass.NOT_ARRIVED: "A node did not come up in time; look at the batch log (python -m "
    "air_hpc logs), and at launch.start_timeout_s.",
    FailureClass.USER_ERROR: "The program would fail again; correct it and submit a new run.",
    FailureClass.CHECKPOINT: "An older checkpoint is taken. Where none is left, the run does not "
    "begin anew in silence: look at its checkpoints folder.",
    FailureClass.STORAGE: "Look at the runs folder: space, quotas of bytes and of files, and the "
    "state of the file system.",
    FailureClass.NETWORK: "Another rank or the network between them; look at which was first.",
    FailureClass.HOST_MEMORY: "Ask for more memory (launch.mem) or run fewer workers a node.",
    FailureClass.DEVICE_MEMORY: "It would run out again; change the plan.",
    FailureClass.DEVICE: "If it comes again on the same node, report the node.",
    FailureClass.DATA: "The named shard cannot be read; restore it, or remove its folder to "
    "have it built again.",
    FailureClass.DIVERGED: "The loss went wrong; look at train/loss, optimizer.lr and train.guard.",
    FailureClass.HANG: "The stacks of all workers tell where each stood; the one named was silent "
    "first.",
    FailureClass.ENVIRONMENT: "The nodes lack something or differ; python -m air_hpc logs tells "
    "more. It is not retried: mend it and submit a new run.",
    FailureClass.UNKNOWN: "Nothing told a cause; the last lines of its log are the best lead. A "
    "rule of your own (recovery.rules) can give it a name.",
}


def hint_of(failure_class: FailureClass) -> str:
    """The hint of a class; empty where there is nothing to do."""
    return _HINTS.get(failure_class, "")
