"""The commands. Each module imports what it needs when its command runs, so that `toolkit --help` starts at once.

| module | gives |
|---|---|
| `app` | `main`: the entry point, which turns errors into messages and exit codes |
| `options` | arguments that commands share; `read_job` and `read_plan` |
| `output` | text, tables, JSON and errors on the terminal |
| `checking` | every check that `validate` makes, at once |
| `local_run` | starts the processes of a plan on this node |
"""
