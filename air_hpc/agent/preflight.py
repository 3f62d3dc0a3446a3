"""The agent's hold on its node's checks: started in the background, told in the hello.

The first hello waits for them, at most `recovery.preflight.timeout_s`; after a failure of a device
the coordinator may ask again. What the devices are is found in the same process, so that a driver
that hangs never hangs the agent: with pre-flight switched off, devices are still asked for there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from air_hpc.agent.channel import Message
from air_hpc.config.spec import RunSpec
from air_hpc.probes.devices import Device, bound_devices
from air_hpc.probes.gpu import GpuAsked
from air_hpc.probes.host import HostAsked
from air_hpc.probes.node import BINDING_VARIABLES, Asked
from air_hpc.probes.result import nothing_to_say
from air_hpc.probes.run import Findings, NodeProbe
from air_hpc.rundir.layout import RunDir


class Preflight:
    """The checks of this node. `start`, then `poll` until it answers."""

    def __init__(
        self, spec: RunSpec, workers: int, run: RunDir, node: str, environ: Mapping[str, str]
    ) -> None:
        """`workers` is how many this node is to start, each with a device of its own."""
        self._spec = spec.recovery.preflight
        self._kind = spec.accelerator.kind
        self._workers = workers
        self._environ = environ
        self._asked = self._what_to_ask(run.path, Path(spec.cluster.node_local_dir), node)
        self._probe: NodeProbe | None = None
        self._found: Findings | None = None

    def _what_to_ask(self, run_dir: Path, node_local_dir: Path, node: str) -> list[Asked]:
        spec = self._spec
        host = HostAsked(
            node, str(run_dir), str(node_local_dir), spec.min_disk_bytes, spec.max_clock_skew_s
        )
        gpu = GpuAsked(
            self._workers,
            {name: self._environ[name] for name in BINDING_VARIABLES if name in self._environ},
            spec.max_used_device_memory_bytes,
            spec.max_ecc_uncorrected,
        )
        asked = [Asked("host", host, gpu)] if spec.enabled else []
        if self._kind == "cuda":
            asked.append(Asked("gpu", host, gpu, checks=spec.enabled))
        return asked

    def start(self) -> None:
        """Begin the checks (anew); what was found before is forgotten."""
        self.close()
        self._found = None
        try:
            self._probe = NodeProbe(
                self._asked,
                timeout_s=self._spec.timeout_s,
                check_timeout_s=self._spec.check_timeout_s,
                environ=self._environ,
            )
        except OSError as error:
            told = nothing_to_say("preflight", f"no process could be started: {error}")
            self._found = Findings((told,))

    def poll(self) -> Findings | None:
        """The findings, or None while they are awaited; the same at every later call."""
        if self._found is None and self._probe is not None:
            self._found = self._probe.poll()
            if self._found is not None:
                self._probe.close()
                self._found = self._with_no_device(self._found)
        return self._found

    def _with_no_device(self, found: Findings) -> Findings:
        if self._kind == "cuda" or not self._spec.enabled:
            return found
        why = "no device" if self._kind == "cpu" else f"nothing is asked of {self._kind} devices"
        return Findings((*found.checks, nothing_to_say("devices", why)), None, found.seconds)

    def fill(self, hello: Message) -> Message:
        """The hello with what was found."""
        found = self._found or Findings(())
        devices: Sequence[Device] | None = found.devices
        if devices is None:  # nobody was asked, or nobody answered: what the binding says
            devices = bound_devices(self._kind, self._workers, self._environ)
        facts: dict[str, Any] = dict(hello.get("facts", {}))
        if self._spec.enabled:
            facts["preflight"] = [check.to_json() for check in found.checks]
            facts["preflight_s"] = found.seconds
        return {**hello, "devices": [device.to_json() for device in devices], "facts": facts}

    def close(self) -> None:
        """End what is still being made."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None
