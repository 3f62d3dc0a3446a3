"""The node side: one process a node that starts, watches and stops the workers.

main          the entry: signal handlers first
    attempt       the loop of one attempt on one node
environment   where this process is: scheduler, node, job, devices, addresses
channel       the agents' own control channel: signed messages, real deadlines
liveness      the port that answers for a node's machine, and the connects that ask it
workers       start worker processes, carry their logs, reap them
node          this node's part: obeys the coordinator, watches its workers
coordinator   the first node's extra part: members, token, stop, verdict, ledger
scheduler     the two questions an agent asks Slurm, at the start and after the end
shipper       the process that feeds MLflow
"""
