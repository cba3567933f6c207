"""Files that start a plan elsewhere: a batch system, other machines by ssh or MPI, Kubernetes, rented cards.

| module | content |
|---|---|
| `catalogue` | each launcher: its files, the options that it takes, and those that it needs |
| `options` | `LaunchOptions`: what a plan does not say, such as a container image or a time limit |
| `checks` | every reason why a launcher cannot start a plan, at once |
| `cards` | the names that providers give to the cards of the catalogue |
| `render` | the text of each file, from the templates in `templates/` |
"""
