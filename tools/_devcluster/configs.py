"""A cluster's configuration files as text: pure functions of the spec, the ports and the folder.

The times are as short as Slurm takes them: a test's length is SlurmdTimeout, KillWait, GraceTime,
cred_expire and the scheduler's intervals (slurm.conf(5)).
"""

from dataclasses import dataclass

from .spec import ClusterSpec
from .state import State

CLUSTER_NAME = "devcluster"
REAL_MEMORY_MIB = 65_536
GPU_TYPE = "h100"
SMALL_CLUSTER_NODES = 64


@dataclass(frozen=True)
class Ports:
    """The block of ports of one cluster: the slurmctld, the slurmdbd, then one a node."""

    first: int

    @staticmethod
    def count(spec: ClusterSpec) -> int:
        """How many a cluster needs."""
        return 2 + spec.nodes

    @property
    def slurmctld(self) -> int:
        """SlurmctldPort."""
        return self.first

    @property
    def slurmdbd(self) -> int:
        """DbdPort."""
        return self.first + 1

    def slurmd(self, spec: ClusterSpec) -> str:
        """The Port= of the NodeName line."""
        low = self.first + 2
        return str(low) if spec.nodes == 1 else f"[{low}-{low + spec.nodes - 1}]"


def slurm_conf(
    spec: ClusterSpec, state: State, ports: Ports, hostname: str, version: tuple[int, int]
) -> str:
    """slurm.conf. `hostname` is this machine's short name, which slurmctld compares with its own.

    Lines of `spec.settings` replace those with the same key.
    """
    small = spec.nodes <= SMALL_CLUSTER_NODES
    interval = 1 if small else 3
    values = {
        "ClusterName": CLUSTER_NAME,
        "SlurmctldHost": f"{hostname}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": "cred_expire=6",  # a requeued job waits for cred_expire + 1 s (default 120)
        "SlurmctldPort": str(ports.slurmctld),
        "SlurmctldPidFile": str(state.folder("run") / "slurmctld.pid"),
        "SlurmdPidFile": str(state.folder("run") / "slurmd.%n.pid"),
        "SlurmdSpoolDir": str(state.folder("spool") / "%n"),
        "StateSaveLocation": str(state.folder("ctld")),
        "SlurmctldLogFile": str(state.folder("log") / "slurmctld.log"),
        "SlurmdLogFile": str(state.folder("log") / "slurmd.%n.log"),
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        "MailProg": "/bin/true",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SwitchType": "switch/none",
        "ReturnToService": "2",
        "SlurmdParameters": "config_overrides",  # nodes claim CPUs and memory that are not there
        "JobRequeue": "1",
        "KillOnBadExit": "0",
        "KillWait": "5",
        "OverTimeLimit": "0",
        "SlurmdTimeout": "10",
        # A dead node is seen only after pings have hung for MessageTimeout: 18 s with 5, 28 s with
        # Slurm's default of 10 (measured on 22.05.8), which a thousand slurmd on one machine need.
        "MessageTimeout": "5" if small else "10",
        "CompleteWait": "0",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": (
            f"sched_interval={interval},batch_sched_delay=1,bf_interval={interval},bf_continue"
        ),
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "MaxArraySize": str(spec.array_max),
        "MaxJobCount": str(max(10_000, 2 * spec.array_max)),
        "GresTypes": "gpu",
        "AccountingStorageType": "accounting_storage/none",
    }
    if not spec.devices_per_node:
        del values["GresTypes"]
    if spec.topology:
        values["TopologyPlugin"] = "topology/tree"
    if spec.accounting:
        values |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "127.0.0.1",
            "AccountingStoragePort": str(ports.slurmdbd),
            "AccountingStorageEnforce": "associations,limits,qos",
            "JobAcctGatherType": "jobacct_gather/none",
        }
        if spec.devices_per_node:
            values["AccountingStorageTRES"] = "gres/gpu"
    if version >= (23, 11):
        del values["SwitchType"]  # switch/none is refused there, and none is the default
    for setting in spec.settings:
        key, _, value = setting.partition("=")
        values = {k: v for k, v in values.items() if k.lower() != key.lower()} | {key: value}
    shared = "EXCLUSIVE" if spec.exclusive else "NO"
    gres = f" Gres=gpu:{GPU_TYPE}:{spec.devices_per_node}" if spec.devices_per_node else ""
    names = "n1" if spec.nodes == 1 else f"n[1-{spec.nodes}]"
    partition = f"Nodes={names} MaxTime=INFINITE DefaultTime=60 State=UP OverSubscribe={shared}"
    lines = [f"{key}={value}" for key, value in values.items()]
    lines += [
        f"NodeName={names} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports.slurmd(spec)} "
        f"CPUs={spec.cpus_per_node} RealMemory={REAL_MEMORY_MIB}{gres} State=UNKNOWN",
        f"PartitionName=low {partition} Default=YES PriorityTier=1 GraceTime=10 "
        "PreemptMode=REQUEUE",
        f"PartitionName=high {partition} Default=NO PriorityTier=10 PreemptMode=OFF",
    ]
    return "\n".join(lines) + "\n"


def gres_conf(spec: ClusterSpec, state: State) -> str:
    """gres.conf: all nodes show the same device files (a count without File= gives 0 GPUs)."""
    last = spec.devices_per_node - 1
    numbers = "0" if last == 0 else f"[0-{last}]"
    return f"Name=gpu Type={GPU_TYPE} File={state.folder('devices')}/nvidia{numbers}\n"


def slurmdbd_conf(state: State, ports: Ports) -> str:
    """slurmdbd.conf; slurmdbd itself refuses it with a mode other than 0600."""
    return f"""AuthType=auth/munge
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports.slurmdbd}
SlurmUser=root
DebugLevel=info
LogFile={state.folder("log")}/slurmdbd.log
PidFile={state.folder("run")}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""
