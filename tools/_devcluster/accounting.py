"""slurmdbd and the mariadb behind it: own data folder, own socket, never the system's.

mariadbd refuses a socket in a folder that its user does not own, so both stand in one folder of
the user mysql. It takes no TCP connections; slurmdbd finds it by MYSQL_UNIX_PORT.
"""

import os
import pwd
import shutil
import socket
import time

from .configs import CLUSTER_NAME, Ports, slurmdbd_conf
from .daemons import record_daemons, start_daemon
from .errors import DevclusterError
from .install import Install
from .spec import ClusterSpec
from .state import State

ACCOUNTS = ("research", "other")
LIMITED_QOS = "limited"
MAX_SUBMIT_PER_USER = 20


def start_accounting(install: Install, spec: ClusterSpec, state: State, ports: Ports) -> None:
    """Start mariadbd and slurmdbd, and register the cluster (before slurmctld asks for it)."""
    _start_mariadbd(install, state)
    conf = state.folder("etc") / "slurmdbd.conf"
    conf.touch(mode=0o600)
    conf.write_text(slurmdbd_conf(state, ports))
    environment = install.environment(str(state.slurm_conf)) | {
        "MYSQL_UNIX_PORT": str(mariadb_socket(state))
    }
    start_daemon(install, state, "slurmdbd", [], environment)
    deadline = time.monotonic() + 60
    while not _listens(ports.slurmdbd):
        if time.monotonic() > deadline:
            raise DevclusterError(
                f"slurmdbd did not listen on port {ports.slurmdbd} within 60 s: see "
                f"{state.folder('log')}/slurmdbd.log"
            )
        time.sleep(0.1)
    record_daemons(state, ["slurmdbd"])
    _sacctmgr(install, state, "add", "cluster", CLUSTER_NAME)


def add_accounts(install: Install, spec: ClusterSpec, state: State) -> None:
    """Two accounts, root and the ordinary user in the first, and a QOS that limits submissions.

    Called once slurmctld has registered: until then sacctmgr knows no gres/gpu.
    """
    _sacctmgr(
        install, state, "add", "qos", LIMITED_QOS, f"MaxSubmitJobsPerUser={MAX_SUBMIT_PER_USER}"
    )
    for account in ACCOUNTS:
        _sacctmgr(install, state, "add", "account", account, f"Cluster={CLUSTER_NAME}",
                  f"Description={account}", "Organization=devcluster")  # fmt: skip
    for user in ("root", spec.user):
        _sacctmgr(install, state, "add", "user", user, f"Account={ACCOUNTS[0]}",
                  f"DefaultAccount={ACCOUNTS[0]}")  # fmt: skip
        _sacctmgr(install, state, "modify", "user", user, "set",
                  f"QOS=normal,{LIMITED_QOS}", "DefaultQOS=normal")  # fmt: skip


def mariadb_socket(state: State) -> str:
    """Where this cluster's mariadbd listens."""
    return str(state.folder("mysql") / "mysqld.sock")


def _start_mariadbd(install: Install, state: State) -> None:
    folder = state.folder("mysql")
    try:
        owner = pwd.getpwnam("mysql")
    except KeyError:
        raise DevclusterError(
            "there is no user mysql: apt-get install --reinstall mariadb-server makes it"
        ) from None
    os.chown(folder, owner.pw_uid, owner.pw_gid)
    data = folder / "data"
    install.run(
        "mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}",
        "--auth-root-authentication-method=normal", "--skip-test-db", timeout_s=180,
    )  # fmt: skip
    # What a test's database may lose in a crash of the machine buys a faster start.
    options = [
        "--no-defaults", "--user=mysql", f"--datadir={data}", "--skip-networking",
        f"--socket={mariadb_socket(state)}", f"--pid-file={folder}/mysqld.pid",
        f"--log-error={folder}/mariadbd.log", "--innodb-flush-log-at-trx-commit=2",
        "--innodb-lock-wait-timeout=900", "--innodb-buffer-pool-size=64M",
    ]  # fmt: skip
    start_daemon(install, state, "mariadbd", options, install.environment())
    deadline = time.monotonic() + 60
    while not os.path.exists(mariadb_socket(state)):
        if time.monotonic() > deadline:
            log = folder / "mariadbd.log"
            shutil.copy(log, state.folder("log"))
            raise DevclusterError(
                f"mariadbd made no socket within 60 s: see {state.folder('log')}/mariadbd.log"
            )
        time.sleep(0.1)
    record_daemons(state, ["mariadbd"])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _sacctmgr(install: Install, state: State, *words: str) -> None:
    install.run("sacctmgr", "-i", *words, slurm_conf=str(state.slurm_conf))
