"""Writes a plan as files: configs of every consumer, ways to start it, and where each value came from.

| module | gives |
|---|---|
| `contents` | the text of every file of a plan |
| `texts` | commands.sh and README.txt |
| `commands` | the ways to start it, and the environment before them |
| `hosts` | the nodes by name: DeepSpeed's hostfile, and the environment that its launcher sends them |
| `provenance` | for each key of each config, the choices of the plan that it follows from |
| `files` | `emit`: all of it in a folder, or nothing |
"""
