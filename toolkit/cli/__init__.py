"""The commands. Each module imports its dependencies when its command runs, so that `toolkit --help` starts at once.

| module | content |
|---|---|
| `app` | `main`: the entry point, which turns errors into messages and exit codes |
| `options` | arguments that commands share; `read_job` and `read_plan` |
| `output` | text, tables, JSON and errors on the terminal |
| `job_checks` | every check that `validate` makes, at once |
| `launching` | starts the processes of a plan on this node |
"""
