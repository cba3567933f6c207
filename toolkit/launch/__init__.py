"""Start, supervise and end the worker processes of one node.

| module | content |
|---|---|
| `environment` | the environment of a worker |
| `identity`, `place`, `rendezvous` | who started this process, as which rank or node, and where rank 0 listens |
| `ports` | a free TCP port, or which process listens on the one that was asked for |
| `devices`, `packages` | which GPUs and optional packages this machine has |
| `quiet` | silence for what installed packages log at their import |
| `software` | what this machine lacks of the software that a job describes |
| `builds` | `check_builds`: whether DeepSpeed's extensions that a plan loads can be compiled here |
| `trial_builds` | builds of them in a process of their own |
| `extensions` | which extensions a plan loads, and where torch builds them |
| `build_tools`, `architectures` | compilers and ninja; the list of architectures as DeepSpeed reads it |
| `build_locks` | locks left by compilations that were killed |
| `output_lock`, `lock_holder` | one run per output folder; which process owns the lock |
| `signals` | the signals that ask a run to end |
| `local` | `launch_local`: starts the ranks of a plan on this machine |
| `nvme` | checks the folder of an NVMe offload and locks it for one run |
| `supervisor` | `supervise`: starts the workers, passes signals on, ends all when one fails |
| `watchdog` | ends the workers when the supervisor itself is killed |
| `outcome` | which rank failed first, why, and the exit code |
"""
