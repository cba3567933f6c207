"""All probes at the same time, each in a process of its own that is ended in time: what hangs is a finding, and never a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.catalog.gpus import Gpu, load_catalogue
from toolkit.doctor import cards, compilers, disks, host, network, software, variables
from toolkit.doctor.findings import Finding, found
from toolkit.doctor.job import job_findings
from toolkit.doctor.kinds import LEVELS
from toolkit.doctor.links import link_findings, read_links
from toolkit.doctor.speeds import Measurement
from toolkit.errors import first_line
from toolkit.forks import Fork, ForkEndedError
from toolkit.launch.devices import chosen_cards
from toolkit.launch.extensions import Machine
from toolkit.launch.trial_builds import BUILD_SECONDS
from toolkit.planning.plan import Plan

# Answers of a healthy machine take tenths of a second; the measurement of the cards has the whole time.
_PROBE_SECONDS = 8.0
SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What was found, the most serious first, and how long that took."""

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def can_run(self) -> bool:
        """Whether nothing was found with which a job could not run."""
        return all(finding.level != "error" for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One look at the machine.

    Args:
        look: Function that yields findings.
        hint: Command that shows the same, for one that hangs or fails.
    """

    look: Callable[[], Iterable[Finding]]
    hint: str


class _Seen(NamedTuple):
    """What NVML says."""

    readings: list[cards.Reading]
    findings: list[Finding]


def examine(
    *,
    plan: Plan | None = None,
    path: str = "",
    output: Path | None = None,
    seconds: float = SECONDS,
    build: bool = False,
) -> Checkup:
    """Look at this machine.

    Args:
        plan: Plan of a job that is to run here.
        path: Its file, for commands.
        output: Folder of checkpoints, if there is no plan.
        seconds: How long the probes may take together; builds are not among them.
        build: Whether to compile DeepSpeed's extensions now.
    """
    began = time.monotonic()
    deadline = began + seconds
    environment = dict(os.environ)
    folder = plan.output_dir if plan is not None else output or Path("outputs")
    findings: list[Finding] = []
    with ExitStack() as stack:
        measurement = stack.enter_context(Measurement()) if _has_device() else None
        card_fork = _started(stack, _look_at_cards)
        forks = [(_started(stack, partial(_listed, probe.look)), probe) for probe in _probes(folder, plan)]
        until = min(deadline, began + _PROBE_SECONDS)
        seen = _answer(card_fork, until, "timeout 10 nvidia-smi")
        readings, told = (seen.readings, seen.findings) if isinstance(seen, _Seen) else ([], [seen])
        findings += told
        if plan is not None:
            look = partial(job_findings, plan, path, readings, environment.get("CUDA_VISIBLE_DEVICES"))
            probe = Probe(look=look, hint=f"toolkit train {path} --dry-run")
            forks.append((_started(stack, partial(_listed, look)), probe))
        for fork, probe in forks:
            answered = _answer(fork, until if probe.look is not None else deadline, probe.hint)
            findings += answered if isinstance(answered, list) else [answered]
        kinds = _catalogued(readings, environment.get("CUDA_VISIBLE_DEVICES"))
        if measurement is not None and (kinds or not readings):  # unless all cards are hidden from runs
            findings += measurement.findings(kinds, seconds=deadline - time.monotonic())
    took = time.monotonic() - began
    if build:
        capability = readings[0].capability if readings else None
        known = compilers.known_extensions(on_card=bool(readings))
        findings += compilers.build_now(known, Machine(), seconds=BUILD_SECONDS, capability=capability)
    findings = [_driver_that_works(finding, findings) for finding in findings]
    order = {level: number for number, level in enumerate(LEVELS)}
    return Checkup(findings=tuple(sorted(findings, key=lambda each: order[each.level])), seconds=took)


def _driver_that_works(finding: Finding, findings: Sequence[Finding]) -> Finding:
    """Return a finding, a driver too old for torch's CUDA as a note where the cards were measured: by NVIDIA's forward compatibility."""
    if finding.code != "DRIVER_OLD" or not any(each.subject == "speeds" for each in findings):
        return finding
    why = "Torch computes on the cards all the same, through NVIDIA's package of forward compatibility"
    return replace(finding, level="note", why=why)


def _probes(folder: Path, plan: Plan | None) -> Iterator[Probe]:
    nodes = 1 if plan is None else plan.job.cluster.nodes
    port = None if plan is None else plan.job.cluster.master_port
    yield Probe(look=software.package_findings, hint="pip check")
    yield Probe(look=software.driver_findings, hint="timeout 10 nvidia-smi")
    yield Probe(look=_look_at_builds, hint="nvcc -V; c++ --version; ninja --version")
    yield Probe(look=_look_at_host, hint="free -g; ulimit -a; df -h /dev/shm")
    for place in disks.places(folder):
        yield Probe(
            look=partial(disks.disk_findings, place),
            hint=f"df -h {place.path}; its file server may be down: mount, and {place.variable}",
        )
    yield Probe(look=partial(network.name_findings, nodes=nodes), hint="getent hosts $(hostname)")
    yield Probe(look=network.hub_findings, hint="getent hosts huggingface.co; offline: export HF_HUB_OFFLINE=1")
    yield Probe(look=partial(network.port_findings, port), hint="ss -ltnp")
    yield Probe(look=network.interface_findings, hint="ip addr")
    yield Probe(look=network.clock_findings, hint="timedatectl")
    yield Probe(look=variables.variable_findings, hint="env")


def _look_at_cards() -> _Seen:
    readings, lost = cards.read_cards()
    findings = [*lost, *cards.card_findings(readings), *link_findings(readings, read_links(readings))]
    if readings:
        findings += cards.xid_findings(cards.kernel_log())
    return _Seen(readings, findings)


def _look_at_builds() -> list[Finding]:
    readings, _ = cards.read_cards()
    capability = readings[0].capability if readings else None
    known = compilers.known_extensions(on_card=bool(readings))
    return list(compilers.build_findings(known, Machine(), capability=capability))


def _look_at_host() -> list[Finding]:
    return list(host.host_findings(num_cards=len(cards.read_cards()[0])))


def _catalogued(readings: list[cards.Reading], visible: str | None) -> list[Gpu | None]:
    """Return the card of the catalogue for each card that processes see."""
    catalogue = load_catalogue()
    by_identity = {reading.identity: catalogue.get(reading.catalogued or "") for reading in readings}
    return [by_identity[identity] for identity in chosen_cards(list(by_identity), visible)]


def _has_device() -> bool:
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


def _listed(look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    return list(look())


def _started(stack: ExitStack, work: Callable[[], Any]) -> Fork[Any]:
    fork: Fork[Any] = Fork(work, with_children=True)
    stack.callback(fork.close, seconds=0.0)
    return fork


def _answer(fork: Fork[Any], until: float, hint: str) -> Any:
    """Return what a probe answers, or a finding that it hangs or failed."""
    try:
        return fork.result(seconds=max(until - time.monotonic(), 0.05))
    except ForkEndedError:
        return found("PROBE_TIMEOUT", f"no answer in time to what `{hint}` asks", hint=hint)
    except Exception as error:  # of one probe, which must not hide what the others found
        return found("PROBE_FAILED", f"{type(error).__name__}: {first_line(error)}", hint=hint)
