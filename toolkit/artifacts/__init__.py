"""A plan written as files: configs of every consumer, ways to start it, and where each value came from.

| module | content |
|---|---|
| `contents` | the text of every file of a plan |
| `texts` | commands.sh and README.txt |
| `commands` | the ways to start it, and the environment that they need |
| `hosts` | the nodes by name: DeepSpeed's hostfile, and the environment that its launcher sends them |
| `launchers` | files that start the plan elsewhere: SLURM, other machines, Kubernetes, rented cards |
| `provenance` | for each key of each config, the choices of the plan that it follows from |
| `files` | `emit`: writes all of the files to a folder, or none |
"""
