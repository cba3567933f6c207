"""Where rank 0 listens; `test_identity.py` has the hosts and ports of whole environments."""

from __future__ import annotations

from toolkit.launch.rendezvous import port_of_job


def test_a_job_id_of_any_length_gives_a_port():
    for job in ("9" * 5000, "\u0663", "job-7"):
        assert 10_000 <= port_of_job({"SLURM_JOB_ID": job}, "slurm")[0] < 30_000
