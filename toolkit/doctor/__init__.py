"""What of this machine keeps a job from running, or makes it slower: found in seconds, each with its repair.

| module | content |
|---|---|
| `kinds` | every code: what it is about, why it matters, how it is repaired |
| `findings` | one finding: its kind, what was seen, how serious it is |
| `checkup` | `examine`: all probes at the same time, each in a process of its own that ends in time |
| `software` | versions of packages, driver and CUDA, and whether they fit |
| `compilers` | whether DeepSpeed's extensions can be built; `--build` builds them |
| `cards`, `links` | the GPUs by NVML: memory taken, errors, clocks; NVLink, PCIe and peers |
| `speeds` | measured copies and all-reduce against the catalogue |
| `host`, `disks`, `network` | RAM, limits, shared memory; space and speed of folders; names, ports, clock |
| `variables` | environment variables that change behaviour, a table of data |
| `job` | whether this machine can run a job |
"""
