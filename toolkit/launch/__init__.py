"""Starts worker processes on one node with the right environment, watches them, and ends them well.

| module | gives |
|---|---|
| `environment` | the environment of a worker; who started this process, and as which rank |
| `ports` | a free TCP port, or who holds the one that was asked for |
| `devices`, `packages` | which cards and optional packages this machine has |
| `software` | what of the cluster that a job describes this machine has not |
| `builds` | `check_builds`: whether DeepSpeed's extensions that a plan loads can be compiled here |
| `extensions` | which those are, and where torch builds them |
| `build_tools`, `architectures` | compilers and ninja; the list of architectures as DeepSpeed reads it |
| `build_locks` | locks of compilations that were killed |
| `output_lock`, `lock_holder` | one run an output folder; which process holds it |
| `signals` | the signals that ask a run to end |
| `local` | `launch_local`: starts the ranks of a plan here |
| `nvme` | whether the folder of an NVMe offload can be swapped to; holds it for one run |
| `supervisor` | `supervise`: starts the workers, passes signals on, ends all when one fails |
| `watchdog` | ends the workers when the supervisor itself is killed |
| `outcome` | which rank failed first, why, and the exit code |
"""
